#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/value.h"
#include "checkpoint/values/value_paths.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Checks that megatron-core can load these tensors, given by torch_dcp keys. Throws for a weight whose first dimension
/// is smaller than the number of ranks that share it: Megatron's FSDP2 has no such shards. For uneven shards, returns a
/// message to log once: megatron-core loads them, but its own FSDP2 cannot write them. Empty otherwise. No
/// communication; call it before the first step.
std::string check_torch_dist_shards(const ShardedTensors& tensors);

/// A training's state in torch_dist's form.
struct TorchDistState {
  ShardedTensors tensors;          ///< stacked; without the optimizer's steps if they are equal
  std::vector<FlatValue> objects;  ///< ShardedObjects of this rank (rng_state)
  Dict common;                     ///< content of common.pt
};
/// Converts tensors and values of save_checkpoint. `world` is the number of ranks with an rng_state.
TorchDistState to_torch_dist(const ShardedTensors& tensors, const Dict& values, int world);

/// Saves into an existing folder as megatron.core.dist_checkpointing.save does (0.16): common.pt, then data files and
/// .metadata as save_dcp, metadata.json last. Collective over `group` (null: this process alone). A failure on one rank
/// throws on all and leaves no metadata.json. Returns all written files on rank 0.
std::vector<WrittenFile> save_torch_dist(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                         const ProcessGroupPtr& group, SavePlanCache* plans = nullptr);

/// Write the two small files; for other writers.
WrittenFile write_torch_dist_common(const std::string& folder, const Dict& common);
WrittenFile write_torch_dist_config(const std::string& folder);

}  // namespace megashard
