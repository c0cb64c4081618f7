#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/value.h"
#include "checkpoint/values/value_paths.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Whether megatron-core could load these tensors, which come by their torch_dcp keys. A weight
/// whose first dimension is smaller than the number of ranks that share it throws: Megatron's FSDP2
/// has no such shards. Dimensions that do not divide evenly return a message to be shown once:
/// megatron-core loads the chunks, but its own FSDP2 writer could not have produced them. Empty:
/// nothing to say. Needs no communication; call it before the first step.
std::string check_torch_dist_shards(const ShardedTensors& tensors);

/// A training's state as torch_dist stores it.
struct TorchDistState {
  ShardedTensors tensors;          ///< stacked; without the optimizer's steps when they are equal
  std::vector<FlatValue> objects;  ///< this rank's ShardedObjects (rng_state)
  Dict common;                     ///< of common.pt
};
/// tensors and values as save_checkpoint takes them; `world` ranks have an rng_state.
TorchDistState to_torch_dist(const ShardedTensors& tensors, const Dict& values, int world);

/// Saves into an existing folder as megatron.core.dist_checkpointing.save does (0.16): common.pt,
/// data files and .metadata as save_dcp, metadata.json last. Collective over `group` (null: this
/// process alone); a failure on one rank is an error on all, and leaves no metadata.json.
/// Returns on rank 0 all files that were written.
std::vector<WrittenFile> save_torch_dist(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                         const ProcessGroupPtr& group, SavePlanCache* plans = nullptr);

/// The two small files, for writers of their own.
WrittenFile write_torch_dist_common(const std::string& folder, const Dict& common);
WrittenFile write_torch_dist_config(const std::string& folder);

}  // namespace megashard
