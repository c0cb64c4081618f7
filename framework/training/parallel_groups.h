#pragma once

#include "framework/arguments/arguments.h"
#include "framework/modules/multi_modal_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// The ranks of a run, as Megatron lays them out: neighbours share the layers of a model, then
/// sequences (sequence_ranks), then come those with other data.
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

/// How the --context-parallel-size ranks of `group` that share this one's sequences do it, neighbours
/// among themselves, so that their exchanges stay within a node; the length is that of no sequence yet. One
/// rank shares with none. Throws where the model cannot share a sequence so. Collective.
SequenceShard sequence_ranks(const Arguments& arguments, const MultiModalModule& model, const ProcessGroupPtr& group);

/// The ranks that read the same rows of different sequences: of each sequence group one. `group`
/// itself where sequences are not shared. Collective.
ProcessGroupPtr data_parallel_group(const Arguments& arguments, const ProcessGroupPtr& group);

}  // namespace megashard
