#pragma once

#include "framework/arguments/arguments.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// The ranks of a run, as Megatron lays them out: neighbours share the layers of a model, then
/// sequences (sequence_group.h), then come those with other data.
struct ParallelGroups {
  /// Nobody shares layers.
  ParallelGroups(ProcessGroupPtr all) : world(all), sharding(std::move(all)) {}  // NOLINT: a world is one
  /// Collective over the world.
  ParallelGroups(const Arguments& arguments, const ProcessGroupPtr& all);

  ProcessGroupPtr world;
  /// --tensor-model-parallel-size neighbours; null: one rank has whole layers.
  ProcessGroupPtr tensor_parallel{};
  /// The ranks that have the same pieces of the layers, which FSDP2 shards over them; the world
  /// where layers are whole.
  ProcessGroupPtr sharding;
};

}  // namespace megashard
