#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel/collectives/agreement.h"
#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/noted_progress.h"
#include "parallel/collectives/wait_error.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

constexpr auto kDeadline = 1000ms;

at::Tensor bytes(int64_t count) { return at::empty({count}, at::kByte); }

/// Two ranks that are threads, and the lines that their waits log.
class LongWaits : public ::testing::Test {
 protected:
  void SetUp() override { MEGASHARD_NOT_ON_SIM("the groups are of the CPU"); }

  void run_pair(const testing::RankBody& body) {
    const auto store = make_in_process_store();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto waits = std::make_shared<GroupWaits>([this](const std::string& line) {
          const std::lock_guard lock(mutex_);
          lines_.push_back(line);
        });
        body(make_gloo_group({.store = store, .rank = rank, .ranks = {0, 1}, .timeout = kDeadline, .waits = waits}));
      });
    }
    for (auto& rank : ranks) rank.join();
  }

  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(LongWaits, SayForWhomWhereAndInWhichCollective) {
  const std::string unit = "model.layers.1";
  std::string failure;
  run_pair([&](const ProcessGroupPtr& world) {
    if (world->rank() == 1) return std::this_thread::sleep_for(3 * kDeadline / 2);
    enter_phase("training step", 12);
    const WaitPlace place(unit);
    failure = message_of([&] { world->all_gather_into(bytes(2), bytes(1)).wait(); });
  });
  enter_phase(nullptr, -1);
  EXPECT_THAT(lines_, ElementsAre("rank 0 has waited 1 s for rank 1: all_gather in group 'world', unit "
                                  "'model.layers.1', training step 12; the run ends after 1 s"));
  EXPECT_THAT(failure, AllOf(StartsWith("all_gather in group 'world' failed on rank 0 after waiting 1."),
                             HasSubstr(" s for rank 1, unit 'model.layers.1', training step 12: a rank died")));
}

/// Covers prefetched gathers and reductions of other groups, which must not wait for a second deadline each.
TEST_F(LongWaits, OneDeadlineEndsAllThatIsUnderWay) {
  run_pair([&](const ProcessGroupPtr& world) {
    const auto part = world->subgroup({0, 1}, "replicas");
    Work first = world->all_gather_into(bytes(2), bytes(1));
    Work second = part->all_reduce(bytes(1), ReduceOp::kSum);
    if (world->rank() == 1) return std::this_thread::sleep_for(3 * kDeadline / 2);
    const std::string failure = message_of([&] { first.wait(); });
    EXPECT_THAT(failure, HasSubstr("all_gather in group 'world' failed"));
    EXPECT_EQ(message_of([&] { second.wait(); }), failure);
    EXPECT_EQ(message_of([&] { part->barrier(); }), failure);
  });
}

TEST_F(LongWaits, AWorkMayTakeLongerThanTheDeadlineWhileItMoves) {
  run_pair([&](const ProcessGroupPtr& world) {
    const auto saves = make_group_apart(world, "saves");
    const auto results = gather_or_throw(saves, [&] {
      for (int part = 0; world->rank() == 1 && part < 30; ++part) {  // a deadline and a half
        std::this_thread::sleep_for(kDeadline / 20);
        note_progress();
      }
      return std::string(1, static_cast<char>('a' + world->rank()));
    });
    EXPECT_THAT(results, ElementsAre("a", "b"));
  });
}

TEST_F(LongWaits, AWorkThatDoesNothingIsGivenUpByName) {
  run_pair([&](const ProcessGroupPtr& world) {
    const auto saves = make_group_apart(world, "saves");
    const std::string failure = message_of([&] {
      all_or_throw(saves, [&] {
        if (world->rank() == 1) std::this_thread::sleep_for(2 * kDeadline);
      });
    });
    EXPECT_THAT(failure, StartsWith("rank 1 has done nothing for ")) << world->rank();
    EXPECT_EQ(message_of([&] { saves->barrier(); }), failure);
    EXPECT_NO_THROW(world->barrier());  // the other group is unaffected
  });
}

TEST_F(LongWaits, ARankThatStopsInAWorkIsGivenUpAtTheDeadline) {
  run_pair([&](const ProcessGroupPtr& world) {
    const auto saves = make_group_apart(world, "saves");
    if (world->rank() == 1) return std::this_thread::sleep_for(3 * kDeadline / 2);
    EXPECT_THAT(message_of([&] { all_or_throw(saves, [] {}); }), HasSubstr("'saves' failed on rank 0"));
  });
}

}  // namespace
}  // namespace megashard
