#pragma once

#include <chrono>
#include <functional>

#include "parallel/collectives/process_group.h"

namespace megashard::testing {

using RankBody = std::function<void(const ProcessGroupPtr& world)>;

/// Runs `body` on `world_size` threads, each a rank of one Gloo group over loopback with a deadline
/// on every wait. In each of them autograd runs on the calling thread and ATen uses one thread. The
/// first rank to fail has its message rethrown, with its number; the others fail at once because
/// its connections close.
void run_ranks(int world_size, const RankBody& body, std::chrono::milliseconds deadline = std::chrono::seconds(20));

/// The same; on the simulated device the groups take CPU tensors too, as those of the backend
/// "cpu:gloo,cuda:nccl", which asynchronous saves need.
void run_ranks_of_both(int world_size, const RankBody& body,
                       std::chrono::milliseconds deadline = std::chrono::seconds(20));

/// The same with fake groups, whose collectives complete at once; for plans and large worlds.
void run_fake_ranks(int world_size, const RankBody& body);

}  // namespace megashard::testing
