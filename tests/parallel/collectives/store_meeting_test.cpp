// Ranks that meet at a store before a call without a deadline: missing ranks, and ranks with another word.

#include "parallel/collectives/store_meeting.h"

#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "parallel/collectives/wait_error.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;

constexpr std::chrono::milliseconds kShort(300);

/// Ranks and timeout only; moves nothing.
class Members final : public ProcessGroup {
 public:
  Members(int rank, int size, std::chrono::milliseconds timeout) : ProcessGroup(rank, all(size), "members", timeout) {}
  c10::DeviceType device_type() const override { return c10::kCPU; }
  Work all_gather_into(at::Tensor, at::Tensor) override { return Work(); }
  Work reduce_scatter_into(at::Tensor, at::Tensor, ReduceOp) override { return Work(); }
  Work all_reduce(at::Tensor, ReduceOp) override { return Work(); }
  Work broadcast(at::Tensor, int) override { return Work(); }
  Work all_to_all_into(at::Tensor, at::Tensor, const Splits&) override { return Work(); }
  Work shift_into(at::Tensor, at::Tensor, int) override { return Work(); }
  void barrier() override {}
  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>&, const std::string&) override { return nullptr; }

 private:
  static std::vector<int> all(int size) {
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
};

/// Message thrown on each rank of `size`; ranks with an empty word do not arrive.
std::vector<std::string> meet(const std::vector<std::string>& words, std::chrono::milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(words.size());
  std::vector<std::string> messages(words.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (words[rank].empty()) continue;
    ranks.emplace_back([&, rank] {
      const Members group(rank, size, timeout);
      try {
        StoreMeeting meeting(store, group, "start", "connecting");
        for (int time = 0; time < 3; ++time) meeting.agree(words[rank]);
      } catch (const TimeoutError& error) {
        messages[rank] = std::string("TimeoutError: ") + error.what_without_backtrace();
      } catch (const c10::Error& error) {
        messages[rank] = error.what_without_backtrace();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  return messages;
}

TEST(StoreMeeting, AllCome) { EXPECT_THAT(meet({"a", "a", "a"}, std::chrono::minutes(1)), Each(IsEmpty())); }

TEST(StoreMeeting, WhoDoesNotComeIsNamedAtTheDeadline) {
  const auto messages = meet({"a", "", "a", ""}, kShort);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(messages[rank],
                AllOf(HasSubstr("TimeoutError: connecting in group 'members' failed on rank "),
                      HasSubstr("raise --distributed-timeout-minutes"), HasSubstr("[ranks 1, 3 did not come]")));
  }
}

TEST(StoreMeeting, WhoSaysSomethingElseIsTold) {
  const auto messages = meet({"16 bytes", "16 bytes", "no memory for 16 bytes"}, std::chrono::minutes(1));
  EXPECT_THAT(messages,
              Each(AllOf(HasSubstr("rank 0: 16 bytes; rank 2: no memory for 16 bytes"), Not(HasSubstr("rank 1: ")))));
}

TEST(StoreMeeting, WhoLooksWhileItWaitsMayLeave) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Members group(0, 2, std::chrono::minutes(1));
  StoreMeeting meeting(store, group, "start", "connecting");
  const auto look = [] { throw std::runtime_error("another rank has failed"); };
  EXPECT_THAT(message_of([&] { meeting.meet("a", look); }), HasSubstr("another rank has failed"));
}

}  // namespace
}  // namespace megashard
