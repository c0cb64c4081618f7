#include "tests/support/run_ranks.h"

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/routed_process_group.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {

namespace {

// A rank in an endless computation cannot be stopped: the test program ends this long after the deadline.
constexpr auto kGrace = std::chrono::seconds(20);

struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done;
  std::optional<std::string> first_failure;
};

using MakeGroup = std::function<ProcessGroupPtr(int rank)>;

void run_rank(int rank, const MakeGroup& make_group, const RankBody& body, Outcome& outcome) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  at::set_num_threads(1);
  const auto fail = [&](const std::string& message) {
    const std::lock_guard lock(outcome.mutex);
    if (!outcome.first_failure) outcome.first_failure = "rank " + std::to_string(rank) + ": " + message;
  };
  try {
    // Recorded before the group is destroyed: that closes connections, so that the other ranks fail, too, but later.
    const ProcessGroupPtr world = make_group(rank);
    try {
      body(world);
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    }
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  const std::lock_guard lock(outcome.mutex);
  outcome.done[static_cast<size_t>(rank)] = true;
  outcome.changed.notify_all();
}

void run_threads(int world_size, const MakeGroup& make_group, const RankBody& body,
                 std::chrono::milliseconds deadline) {
  Outcome outcome;
  outcome.done.assign(static_cast<size_t>(world_size), false);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { run_rank(rank, make_group, body, outcome); });
  }
  {
    std::unique_lock lock(outcome.mutex);
    const auto all_done = [&] { return std::accumulate(outcome.done.begin(), outcome.done.end(), 0) == world_size; };
    if (!outcome.changed.wait_for(lock, deadline + kGrace, all_done)) {
      for (int rank = 0; rank < world_size; ++rank) {
        if (!outcome.done[static_cast<size_t>(rank)]) std::fprintf(stderr, "run_ranks: rank %d hangs\n", rank);
      }
      if (outcome.first_failure) std::fprintf(stderr, "run_ranks: before that, %s\n", outcome.first_failure->c_str());
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  TORCH_CHECK(!outcome.first_failure, *outcome.first_failure);
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

ProcessGroupPtr group_on_cpu(const GroupStorePtr& store, int rank, int world_size, std::chrono::milliseconds deadline) {
  return make_gloo_group({.store = store, .rank = rank, .ranks = all_ranks(world_size), .timeout = deadline});
}

ProcessGroupPtr group_on_simulated_device(const GroupStorePtr& store, int rank, int world_size,
                                          std::chrono::milliseconds deadline) {
  const int device = rank % simulated_cuda().device_count();
  simulated_cuda().set_device(device);
  return simulated_cuda().make_nccl_group(
      {.store = store, .rank = rank, .ranks = all_ranks(world_size), .timeout = deadline, .device = device});
}

}  // namespace

void run_ranks(int world_size, const RankBody& body, std::chrono::milliseconds deadline) {
  const GroupStorePtr store = make_in_process_store();
  const auto make_group = [&](int rank) {
    return on_simulated_device() ? group_on_simulated_device(store, rank, world_size, deadline)
                                 : group_on_cpu(store, rank, world_size, deadline);
  };
  run_threads(world_size, make_group, body, deadline);
}

void run_ranks_of_both(int world_size, const RankBody& body, std::chrono::milliseconds deadline) {
  const GroupStorePtr of_cpu = make_in_process_store(), of_device = make_in_process_store();
  const auto make_group = [&](int rank) {
    auto on_cpu = group_on_cpu(of_cpu, rank, world_size, deadline);
    if (!on_simulated_device()) return on_cpu;
    return make_routed_group(std::move(on_cpu), group_on_simulated_device(of_device, rank, world_size, deadline));
  };
  run_threads(world_size, make_group, body, deadline);
}

void run_fake_ranks(int world_size, const RankBody& body) {
  const auto make_group = [&](int rank) {
    if (!on_simulated_device()) return make_fake_group({.rank = rank, .world_size = world_size});
    simulated_cuda().set_device(rank % simulated_cuda().device_count());
    return make_fake_group({.rank = rank, .world_size = world_size, .device_type = c10::kCUDA});
  };
  run_threads(world_size, make_group, body, std::chrono::seconds(20));
}

}  // namespace megashard::testing
