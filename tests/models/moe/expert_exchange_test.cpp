#include "models/moe/expert_parallel.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

// Four experts, two on each rank. Rank 0 sends 1, 0, 5, 1 of its seven rows to them, rank 1 sends 0, 2, 0, 3 of its
// five.
TEST(ExpertExchange, TheWireCarriesTheRowsAndNoMore) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    constexpr int64_t kWidth = 3;
    const bool first = world->rank() == 0;
    const std::vector<int64_t> counts = first ? std::vector<int64_t>{1, 0, 5, 1} : std::vector<int64_t>{0, 2, 0, 3};
    const int64_t rows = first ? 7 : 5, arriving = first ? 1 + 2 : 6 + 3;
    std::vector<CollectiveCall> calls;
    const auto recording = std::make_shared<RecordingGroup>(world, calls);
    const auto exchange =
        c10::make_intrusive<ExpertExchange>(recording, at::tensor(counts, at::kLong).to(device_of_tests()), rows);
    EXPECT_THAT(exchange->own_rows()->on_host(), first ? ::testing::ElementsAre(1, 2) : ::testing::ElementsAre(5, 4));

    const at::Tensor mine = at::full({rows, kWidth}, world->rank(), at::TensorOptions(device_of_tests()));
    const at::Tensor arrived = ExpertExchange::send(exchange, mine);
    EXPECT_EQ(arrived.size(0), arriving);
    EXPECT_TRUE(at::equal(ExpertExchange::send_back(exchange, arrived), mine));
    std::vector<int64_t> sent;
    for (const CollectiveCall& call : calls) {
      if (call.operation == "all_to_all") sent.push_back(call.numel);
    }
    EXPECT_THAT(sent, ::testing::ElementsAre(rows * kWidth, arriving * kWidth));
  });
}

}  // namespace
}  // namespace megashard::testing
