#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/dcp_reader.h"
#include "checkpoint/value.h"
#include "parallel/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Saves a step in Megatron's layout: DIRECTORY/iter_0000010/{.metadata, __{rank}_0.distcp}, and
/// for torch_dist {common.pt, metadata.json}; then the tracker. Collective over `group` (null: this
/// process alone); on return the step is on the disk, whole, and the latest.
///
/// tensors: "model.<name>", "optimizer.state.<name>.exp_avg", ...; every rank gives its shards, in
/// any order. values: what is not a tensor, nested: {"args": make_namespace(..), "iteration": 10,
/// "checkpoint_version": 3.0,
///   "optimizer": {"param_groups": List{..}}, "opt_param_scheduler": {..}, "rng_state": {"<rank>":
///   {..}}, ...}. Ranks may give different keys (as in rng_state: each its own); equal keys must
///   hold equal values.
/// A failure on any rank is thrown on all of them, and leaves the directory as it was.
void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors,
                     const Dict& values, const ProcessGroupPtr& group,
                     CheckpointFormat format = CheckpointFormat::kTorchDcp);

/// The step that a run loads: the one of iteration `ckpt_step`, or unset, the latest; nothing when
/// the directory has no tracker, as in a first start. Collective: the first rank looks, so that a
/// tracker that moves meanwhile does not lead ranks to different steps.
std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        std::optional<int64_t> ckpt_step = std::nullopt);

struct LoadedCheckpoint {
  Dict values;        ///< nested as they were saved
  LoadReport report;  ///< of keys, when not strict
};

/// Loads a step into `tensors` (in place, any world size, dtypes converted) and returns its values.
/// LoadOptions::wanted leaves parts out, such as every "optimizer." or the other ranks'
/// "rng_state.<rank>.".
LoadedCheckpoint load_checkpoint(const CheckpointStep& step, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});
/// The same for the latest step of a directory that has one.
LoadedCheckpoint load_checkpoint(const std::string& directory, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});

}  // namespace megashard
