// Replicated tensors that differ between ranks, as a BatchNorm's running statistics.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/steps/find_step.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;

ShardedTensors statistics(double value) {
  ShardedTensors tensors;
  for (const char* name : {"model.first.mean", "model.first.variance", "model.second.mean", "model.second.variance"})
    tensors.emplace_back(name, ShardedTensor::replicated(at::full({4}, value)));
  tensors.emplace_back("model.count", ShardedTensor::replicated(at::zeros({})));
  return tensors;
}

class DifferingCopies : public ::testing::TestWithParam<CheckpointFormat> {};

TEST_P(DifferingCopies, AreThoseOfTheFirstRankAndToldOnce) {
  TemporaryFolder folder;
  std::vector<std::string> told;
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    SaveOptions options{.format = GetParam(), .plans = std::make_shared<SavePlanCache>()};
    options.notice = [&](const std::string& line) {
      TORCH_CHECK(group->rank() == 0);
      told.push_back(line);
    };
    for (const int64_t step : {1, 2})
      save_checkpoint(folder.path(), step, statistics(1.0 + group->rank()), {}, group, options);
    const auto loaded = statistics(0);
    load_checkpoint(*find_step(folder.path(), group), loaded, group);
    for (size_t i = 0; i < 4; ++i) TORCH_CHECK(at::equal(loaded[i].second.local, at::full({4}, 1.0)), loaded[i].first);
  });
  EXPECT_THAT(told, ElementsAre("these differ between the ranks, and no sharding keeps them equal: model.first.mean, "
                                "model.first.variance, model.second.mean, model.second.variance; a checkpoint has "
                                "those of the first rank, which every rank gets when it is loaded"));
}

INSTANTIATE_TEST_SUITE_P(Formats, DifferingCopies,
                         ::testing::Values(CheckpointFormat::kTorchDcp, CheckpointFormat::kTorchDist));

}  // namespace
}  // namespace megashard
