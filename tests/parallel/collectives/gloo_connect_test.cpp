#include "parallel/collectives/gloo_connect.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "parallel/collectives/group_store.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

/// Throws when Gloo writes this rank's address in one of the first `failures` attempts.
class BrokenStore final : public c10d::PrefixStore {
 public:
  BrokenStore(c10::intrusive_ptr<c10d::Store> inner, int failures, std::function<void()> fail)
      : c10d::PrefixStore("broken", std::move(inner)), failures_(failures), fail_(std::move(fail)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    for (int attempt = 0; attempt < failures_; ++attempt) {
      const std::string place = "attempt_" + std::to_string(attempt);
      if (key.starts_with(place) && key != place + "/complete" && key != place + "/failure") fail_();
    }
    PrefixStore::set(key, value);
  }

 private:
  int failures_;
  std::function<void()> fail_;
};

void lose_connection() { throw std::runtime_error("Connection closed by peer"); }

/// Ranks of which the second fails to connect; the message of each, which is their sum where they met after all.
std::vector<std::string> connect_with_failures(int failures, int ranks = 2,
                                               const std::function<void()>& fail = lose_connection,
                                               std::chrono::milliseconds timeout = std::chrono::seconds(2)) {
  const GroupStorePtr shared = make_in_process_store();
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  std::vector<std::string> messages(all.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      messages[static_cast<size_t>(rank)] = message_of([&] {
        const auto store = std::make_shared<GroupStore>();
        store->store = c10::make_intrusive<BrokenStore>(shared->store, rank == 1 ? failures : 0, fail);
        const ProcessGroupPtr world = make_gloo_group({.store = store, .rank = rank, .ranks = all, .timeout = timeout});
        const at::Tensor sum = at::full({1}, 2.0 * (rank + 1), at::kFloat);
        world->all_reduce(sum, ReduceOp::kSum).wait();
        world->barrier();
        throw std::runtime_error(std::to_string(sum.item<int>()));
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return messages;
}

TEST(GlooConnect, ARankThatNeverComesEndsIt) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  const std::string message = message_of([] {
    make_gloo_group({.store = make_in_process_store(), .ranks = {0, 1}, .timeout = std::chrono::milliseconds(300)});
  });
  EXPECT_THAT(message, AllOf(HasSubstr("connecting to the other ranks in group 'world' failed on rank 0 after"),
                             HasSubstr("--distributed-timeout-minutes")));
}

TEST(GlooConnect, AConnectionThatFailsIsMadeAgainByAll) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  EXPECT_EQ(connect_with_failures(0), (std::vector<std::string>{"6", "6"}));
  EXPECT_EQ(connect_with_failures(1), (std::vector<std::string>{"6", "6"}));
}

TEST(GlooConnect, AConnectionThatKeepsFailingEndsEveryRankWithItsCause) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  for (const std::string& message : connect_with_failures(3)) {
    EXPECT_THAT(message, AllOf(HasSubstr("connecting to the other ranks in group 'world' failed"),
                               HasSubstr("[rank 1: Gloo connectFullMesh failed with "
                                         "Connection closed by peer]")));
  }
}

TEST(GlooConnect, ARankWithoutMemoryEndsTheOthersAtOnce) {
  MEGASHARD_NOT_ON_SIM("what it expects is Gloo's");
  const auto begun = std::chrono::steady_clock::now();
  // An attempt takes a minute.
  const auto messages = connect_with_failures(
      1, 3, [] { throw std::bad_alloc(); }, std::chrono::minutes(20));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(30));
  for (const std::string& message : messages) {
    EXPECT_THAT(message,
                AllOf(StartsWith("rank 1 has no memory, or may start no thread, to connect to the other ranks"),
                      HasSubstr("std::bad_alloc]: allow it more (ulimit -v")));
  }
}

}  // namespace
}  // namespace megashard
