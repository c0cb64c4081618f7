#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/steps/run_history.h"
#include "checkpoint/values/value.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

struct SaveOptions {
  CheckpointFormat format = CheckpointFormat::kTorchDcp;
  RetentionPolicy retention{};
  RunHistory run{};  ///< whose step it is; the first rank's counts
  /// On the first rank, for what goes wrong without harm to the step: old ones that stay.
  std::function<void(const std::string& line)> notice{};
  TiedKeys tied{};  ///< of torch_dcp; Megatron stores a shared weight under one key
  std::shared_ptr<SavePlanCache> plans{};  ///< of this rank's earlier saves; null: none are kept
};

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
/// A failure on any rank is thrown on all of them, and leaves what was there, or when it comes
/// after the step's rename, the new step. Where `options` keeps few steps, all ranks then read the
/// new one again, and the first removes what is too old, unless a byte differs. For saves beside
/// the training, see async_saver.h.
void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors,
                     const Dict& values, const ProcessGroupPtr& group,
                     const SaveOptions& options = {});

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
