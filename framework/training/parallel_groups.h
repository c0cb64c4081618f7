#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "framework/arguments/context_parallel_arguments.h"
#include "framework/arguments/parallel_arguments.h"
#include "framework/modules/multi_modal_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// The ranks of a run, as Megatron lays them out: neighbours share the layers of a model, then
/// sequences (sequence_ranks), then come those with other data.
struct ParallelGroups {
  /// Nobody shares layers.
  ParallelGroups(ProcessGroupPtr all) : world(all), sharding(std::move(all)) {}  // NOLINT: a world is one
  /// Collective over the world.
  ParallelGroups(const DistributedArguments& arguments, const ProcessGroupPtr& all);

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
SequenceShard sequence_ranks(const ContextParallelArguments& arguments, const MultiModalModule& model,
                             const ProcessGroupPtr& group);

/// The ranks that read the same rows of different sequences: of each sequence group one. `group`
/// itself where sequences are not shared. Collective.
ProcessGroupPtr data_parallel_group(const ContextParallelArguments& arguments, const ProcessGroupPtr& group);

/// Selects the parameters that every rank holds whole and nothing reduces: neither fully_shard nor tensor parallelism
/// manages them (ignored_modules of the FSDP2 file).
std::vector<at::Tensor> replicated_parameters(const std::vector<at::Tensor>& parameters);

/// Averages their gradients over the ranks, as fully_shard does for its own, by one all-reduce in
/// fp32 (fp64 if one of them is). A gradient that some ranks lack counts as zero there; one that
/// all lack stays undefined. Collective: every rank passes the same parameters, once a step, after
/// the last backward.
void reduce_replicated_gradients(const std::vector<at::Tensor>& parameters, ProcessGroup& group);

}  // namespace megashard
