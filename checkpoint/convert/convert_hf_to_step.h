#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/dcp/checkpoint_format.h"

namespace megashard {

struct HfToStepOptions {
  std::string hf_dir;    ///< a Hugging Face model directory with safetensors
  std::string save_dir;  ///< receives release/, and the tracker unless that names an iteration
  CheckpointFormat format = CheckpointFormat::kTorchDcp;
  /// A weight whose name begins with hf_prefix gets the key "model." + dcp_prefix + the rest, others "model." + their
  /// name.
  std::string dcp_prefix;
  std::string hf_prefix;
  /// How files have the model's weights; the step gets the model's own tensors. Its names are converted before the
  /// prefixes, its forms after them.
  WeightMap weights{};
  /// (target, source): stores the weight `source` also as `target`, for models that train tied weights separately.
  std::vector<std::pair<std::string, std::string>> tie_weight_mapping;
  /// Name parts of stacked experts [E, I, O] to store as [E * I, O].
  std::vector<std::string> fused_linear_names;
  bool to_bf16 = false;  ///< converts floating-point weights to bfloat16; otherwise dtypes are kept
  /// Checks the weights of the files and those of tie_weight_mapping before any is read; throws to refuse them. Null:
  /// no check.
  std::function<void(const std::vector<TensorInfo>& weights)> check{};
  bool overwrite = false;                           ///< replaces an existing release
  const MegatronLayout* megatron_layout = nullptr;  ///< null: names are kept
};

/// Writes SAVE_DIR/release as MindSpeed-MM's hf_to_dcp does: one .distcp file per safetensors file, and
/// checkpoint_version 3.0; with a layout also Megatron's args. Holds one tensor in memory at a time. The step appears
/// atomically.
void convert_hf_to_step(const HfToStepOptions& options, const ConvertProgress& progress);

}  // namespace megashard
