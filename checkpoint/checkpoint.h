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
#include "checkpoint/readers/checkpoint_reader.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/steps/retention.h"
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
  CheckpointFormat format = CheckpointFormat::kTorchDcp;  ///< as PyTorch; --ckpt-format has Megatron's default
  RetentionPolicy retention{};
  RunHistory run{};  ///< run that writes the step; the first rank's value is saved
  /// Receives, on the first rank, failures that do not harm the step, such as old steps that could not be removed.
  std::function<void(const std::string& line)> notice{};
  TiedKeys tied{};                         ///< torch_dcp: further keys of shared weights
  bool bare_names = false;                 ///< torch_dcp: writes weights without "model." before them
  std::shared_ptr<SavePlanCache> plans{};  ///< plans of this rank's earlier saves; null: not reused
};

/// Saves a step in Megatron's layout: DIRECTORY/iter_0000010/{.metadata, __{rank}_0.distcp}, and for torch_dist
/// {common.pt, metadata.json}; then updates the tracker. Collective over `group` (null: this process alone). On return
/// the step is complete, synced and the latest.
///
/// tensors: "model.<name>", "optimizer.state.<name>.exp_avg", ...; every rank passes its shards, in any order.
/// values: everything that is not a tensor, nested: {"args": make_namespace(..), "iteration": 10, "checkpoint_version":
/// 3.0, "optimizer": {"param_groups": List{..}}, "opt_param_scheduler": {..}, "rng_state": {"<rank>": {..}}, ...}.
/// Ranks may pass different keys (in rng_state each its own); equal keys must hold equal values.
/// A failure on one rank is thrown on all ranks. The previous step is kept; after the rename, the new one is. The first
/// rank then removes old steps as options.retention says. For saves during training, see async_saver.h.
void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors, const Dict& values,
                     const ProcessGroupPtr& group, const SaveOptions& options = {});

/// Keys in sorted order, merged over all ranks: each rank may request others.
struct LoadReport {
  std::vector<std::string> missing;     ///< requested, but not in the checkpoint
  std::vector<std::string> unexpected;  ///< tensors of the checkpoint that no rank requested
  StepNames names{};                    ///< key prefixes of the checkpoint
};

struct LoadOptions {
  /// Throws and lists the keys if tensors are missing or unexpected. Otherwise they are only reported.
  bool strict = true;
  /// Selects the keys to load. Others are skipped and not reported as unexpected. Null: all.
  std::function<bool(const std::string& key)> wanted;
  /// Checks the plain values (nested) and the key report before any tensor is changed; throws to refuse the checkpoint.
  /// The rank that threw gets the error unchanged, the others with that rank's number.
  std::function<void(const Dict& values, const LoadReport& report)> accept{};
  /// Names of the model's parameters in the order of parameters(), without duplicates. They give names to optimizer
  /// state that PyTorch's optimizer.state_dict() has numbered. Empty if unknown.
  std::vector<std::string> parameters{};
  /// Other forms that a step may have of a tensor, each as its keys with parts of `tensor`, which they alias, in them;
  /// equal keys may repeat. Used if the step lacks the key or has it with other sizes: the first form of which it has
  /// all keys, with their sizes. Null: none.
  std::function<std::vector<ShardedTensors>(const std::string& key, const ShardedTensor& tensor)> other_forms{};
  /// Names of weights in those forms (ModelNames::others).
  std::vector<std::string> other_names{};
  /// Format that the step must have; otherwise throws an error that names --ckpt-format. Unset: detected.
  std::optional<CheckpointFormat> format{};
};

struct LoadedCheckpoint {
  Dict values;        ///< nested as saved
  LoadReport report;  ///< missing and unexpected keys, if not strict
};

/// Loads a step into `tensors` in place and returns its values. The world size may differ; dtypes are converted. Keys
/// are those of save_checkpoint, also if the step spells them differently (step_names.h). Collective over `group`
/// (null: this process alone). Values are read first. Names and sizes are checked before any tensor is changed. An
/// error on one rank is thrown on all. LoadOptions::wanted skips parts, such as "optimizer." or other ranks'
/// "rng_state.<rank>.".
LoadedCheckpoint load_checkpoint(const CheckpointStep& step, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});
/// Loads the latest step of a directory; throws ValueError if it has none.
LoadedCheckpoint load_checkpoint(const std::string& directory, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options = {});

/// Opens a step's folder, a training's directory, a Hugging Face directory, a .safetensors file or a torch.save file;
/// throws ValueError for anything else. A training's directory gives the step that a run would load (find_step.h);
/// `notice` receives a line if that is not the tracker's. A step's folder and `ckpt_step` are opened without a check
/// for damage.
std::unique_ptr<CheckpointReader> open_checkpoint(const std::string& path,
                                                  std::optional<int64_t> ckpt_step = std::nullopt,
                                                  const std::function<void(const std::string& line)>& notice = {});

/// Opens a step's folder, torch_dcp or torch_dist. Throws for others, as detect_format does.
std::unique_ptr<CheckpointReader> open_step(const std::string& folder);
/// Opens a step for a model, with the keys of state_dict_keys.h also if the step has other ones, which are stored in
/// `found`.
std::unique_ptr<CheckpointReader> open_step_for(const ModelNames& model, const std::string& folder,
                                                StepNames* found = nullptr);

}  // namespace megashard
