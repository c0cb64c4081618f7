#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/step_names.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/steps/run_history.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/value.h"

namespace megashard {

class ProcessGroup;
using ProcessGroupPtr = std::shared_ptr<ProcessGroup>;
struct ShardedTensor;
using ShardedTensors = std::vector<std::pair<std::string, ShardedTensor>>;
struct CheckpointStep;
struct SavePlanCache;

struct SaveOptions {
  CheckpointFormat format = CheckpointFormat::kTorchDcp;  ///< as PyTorch; --ckpt-format's default is Megatron's
  RetentionPolicy retention{};
  RunHistory run{};  ///< whose step it is; the first rank's counts
  /// On the first rank, for what goes wrong without harm to the step: old ones that stay.
  std::function<void(const std::string& line)> notice{};
  TiedKeys tied{};                         ///< of torch_dcp
  bool bare_names = false;                 ///< torch_dcp: writes weights without "model." before them
  std::shared_ptr<SavePlanCache> plans{};  ///< of this rank's earlier saves; null: none are kept
};

/// Saves a step in Megatron's layout: DIRECTORY/iter_0000010/{.metadata, __{rank}_0.distcp}, and
/// for torch_dist {common.pt, metadata.json}; then the tracker. Collective over `group` (null: this
/// process alone); on return the step is on the disk, whole, and the latest.
///
/// tensors: "model.<name>", "optimizer.state.<name>.exp_avg", ...; every rank gives its shards, in any order.
/// values: what is not a tensor, nested: {"args": make_namespace(..), "iteration": 10, "checkpoint_version": 3.0,
/// "optimizer": {"param_groups": List{..}}, "opt_param_scheduler": {..}, "rng_state": {"<rank>": {..}}, ...}. Ranks may
/// give different keys (as in rng_state: each its own); equal keys must hold equal values.
/// A failure on any rank is thrown on all of them, and leaves what was there, or when it comes after the step's rename,
/// the new step. Where `options` keeps few steps, the first rank then removes what is too old. For saves beside the
/// training, see async_saver.h.
void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors, const Dict& values,
                     const ProcessGroupPtr& group, const SaveOptions& options = {});

/// Names in order, of all ranks together: each may ask for others.
struct LoadReport {
  std::vector<std::string> missing;     ///< asked for, not in the checkpoint
  std::vector<std::string> unexpected;  ///< tensors of the checkpoint that were not asked for
  StepNames names{};                    ///< how the checkpoint spells them
};

struct LoadOptions {
  /// Missing and unexpected tensors are an error that lists them; otherwise they are only reported.
  bool strict = true;
  /// Keys to load; the others are left alone and are not unexpected. Null: all.
  std::function<bool(const std::string& key)> wanted;
  /// Looks at the plain values (nested) and at the names before any tensor is changed, and throws
  /// to refuse them: that is thrown as it is, and where it was not thrown, with the rank's number.
  std::function<void(const Dict& values, const LoadReport& report)> accept{};
  /// The model's parameters in the order of its parameters(), each once: whose the optimizer's state is that
  /// PyTorch's optimizer.state_dict() numbers. Empty: such state is under no name.
  std::vector<std::string> parameters{};
  /// A folder of another format is an error that names --ckpt-format. Unset: it is detected.
  std::optional<CheckpointFormat> format{};
};

struct LoadedCheckpoint {
  Dict values;        ///< nested as they were saved
  LoadReport report;  ///< of keys, when not strict
};

/// Loads a step into `tensors` (in place, any world size, dtypes converted) and returns its values. Keys of the
/// tensors are those of save_checkpoint, also where the step has others (step_names.h).
/// Collective over `group` (null: this process alone). Values are read first; names and sizes are
/// checked before any tensor is changed; an error on one rank is one on all. LoadOptions::wanted leaves parts out, such
/// as every "optimizer." or the other ranks' "rng_state.<rank>.".
LoadedCheckpoint load_checkpoint(const CheckpointStep& step, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});
/// The same for the latest step of a directory that has one.
LoadedCheckpoint load_checkpoint(const std::string& directory, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});

}  // namespace megashard
