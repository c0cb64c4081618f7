#pragma once

#include <chrono>
#include <functional>

#include "parallel/collectives/process_group.h"

namespace megashard::testing {

using RankBody = std::function<void(const ProcessGroupPtr& world)>;

/// Runs `body` on `world_size` threads. Each is a rank of one Gloo group over loopback, with a deadline on every wait.
/// Autograd runs on the calling thread and ATen uses one thread. Rethrows the message of the first rank that fails,
/// with its number; the other ranks then fail at once, because its connections close.
void run_ranks(int world_size, const RankBody& body, std::chrono::milliseconds deadline = std::chrono::seconds(20));

/// The same. On the simulated device the groups also take CPU tensors, like the backend "cpu:gloo,cuda:nccl", which
/// asynchronous saves need.
void run_ranks_of_both(int world_size, const RankBody& body,
                       std::chrono::milliseconds deadline = std::chrono::seconds(20));

/// The same with fake groups, whose collectives complete at once. For plans and large worlds.
void run_fake_ranks(int world_size, const RankBody& body);

}  // namespace megashard::testing
