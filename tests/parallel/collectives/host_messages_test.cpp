#include "parallel/collectives/host_messages.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kBytes = 100'000;
constexpr int kTag = 7;

std::vector<char> bytes_of(int rank) { return std::vector<char>(kBytes, static_cast<char>('a' + rank)); }

TEST(HostMessages, AreCopiedFromWhereTheyAreOnceTheyArePosted) {
  MEGASHARD_NOT_ON_SIM("its groups move tensors of the device");
  run_ranks(3, [](const ProcessGroupPtr& world) {
    const auto host = HostMessages::connect(*world);
    ASSERT_NE(host, nullptr);
    const int next = (world->rank() + 1) % 3, previous = (world->rank() + 2) % 3;
    EXPECT_TRUE(host->reaches(next) && host->reaches(previous));
    EXPECT_FALSE(host->reaches(world->rank()));

    std::vector<char> got(kBytes);
    EXPECT_FALSE(host->take(got.data(), kBytes, previous, kTag));
    world->barrier();
    const auto mine = bytes_of(world->rank()), others = bytes_of(9);
    auto* other = host->post(others.data(), kBytes, next, kTag + 1);
    auto* slot = host->post(mine.data(), kBytes, next, kTag);
    while (!host->take(got.data(), kBytes, previous, kTag)) host->sleep(host->news(), Milliseconds(1));
    EXPECT_EQ(got, bytes_of(previous));
    while (!host->is_taken(*slot)) host->sleep(host->news(), Milliseconds(1));
    EXPECT_FALSE(host->take(got.data(), kBytes, previous, kTag)) << "was taken once";
    world->barrier();
    host->withdraw(*other);
    world->barrier();
    EXPECT_FALSE(host->take(got.data(), kBytes, previous, kTag + 1)) << "was withdrawn";
    world->barrier();
  });
}

TEST(HostMessages, WakeWhoSleeps) {
  MEGASHARD_NOT_ON_SIM("its groups move tensors of the device");
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto host = HostMessages::connect(*world);
    ASSERT_NE(host, nullptr);
    const uint32_t seen = host->news();
    world->barrier();
    if (world->rank() == 1) {
      std::this_thread::sleep_for(Milliseconds(50));
      host->post(&seen, sizeof(seen), 0, kTag);
    } else {
      const auto started = std::chrono::steady_clock::now();
      host->sleep(seen, Milliseconds(10'000));
      EXPECT_NE(host->news(), seen);
      EXPECT_LT(std::chrono::steady_clock::now() - started, Milliseconds(5'000));
      host->sleep(host->news(), Milliseconds(5));  // nobody wakes it
    }
    world->barrier();
  });
}

TEST(HostMessages, RefuseOtherSizesAndTooMany) {
  MEGASHARD_NOT_ON_SIM("its groups move tensors of the device");
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto host = HostMessages::connect(*world);
    ASSERT_NE(host, nullptr);
    const auto mine = bytes_of(0);
    host->post(mine.data(), kBytes, 1 - world->rank(), 0);
    world->barrier();
    std::vector<char> got(8);
    EXPECT_THAT(message_of([&] { host->take(got.data(), got.size(), 1 - world->rank(), 0); }),
                HasSubstr("sent 100000 bytes where this rank takes 8"));
    EXPECT_THAT(message_of([&] {
                  for (int tag = 1; tag < 1000; ++tag) host->post(mine.data(), kBytes, 1 - world->rank(), tag);
                }),
                HasSubstr("more than 256 messages"));
    world->barrier();
  });
}

TEST(HostMessages, AreNotThereWhereTheyAreNotWanted) {
  MEGASHARD_NOT_ON_SIM("its groups move tensors of the device");
  setenv("MEGASHARD_HOST_MESSAGES", "0", 1);
  run_ranks(2, [](const ProcessGroupPtr& world) {
    EXPECT_EQ(HostMessages::connect(*world), nullptr);
    const at::Tensor all = at::empty({20'000}, at::kFloat);
    world->all_gather_into(all, at::arange(10'000, at::kFloat)).wait();  // by Gloo
    EXPECT_TRUE(at::equal(all.narrow(0, 10'000, 10'000), at::arange(10'000, at::kFloat)));
  });
  unsetenv("MEGASHARD_HOST_MESSAGES");
}

/// Collectives of two processes; true if their messages go through memory and the bytes are right.
bool gathers_by_memory(const std::string& file, int rank) {
  const auto store = std::make_shared<GroupStore>();
  store->store = c10::make_intrusive<c10d::FileStore>(file, 2);
  const auto world = make_gloo_group({.store = store, .rank = rank, .ranks = {0, 1}, .timeout = Milliseconds(20'000)});
  const auto host = HostMessages::connect(*world);
  bool right = host != nullptr && host->reaches(1 - rank);
  for (const int64_t n : {1, 1000, 3'000'000}) {
    const at::Tensor all = at::empty({2 * n}, at::kFloat);
    world->all_gather_into(all, at::arange(rank, n + rank, at::kFloat)).wait();
    for (int each = 0; each < 2; ++each)
      right = right && at::equal(all.narrow(0, each * n, n), at::arange(each, n + each, at::kFloat));
  }
  world->barrier();
  return right;
}

TEST(HostMessages, GoBetweenProcesses) {
  MEGASHARD_NOT_ON_SIM("its groups move tensors of the device");
  const std::string file = std::filesystem::temp_directory_path() / ("host_messages." + std::to_string(getpid()));
  const pid_t child = fork();
  if (child == 0) _exit(gathers_by_memory(file, 1) ? 0 : 1);
  EXPECT_TRUE(gathers_by_memory(file, 0));
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace megashard
