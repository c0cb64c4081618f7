#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/convert/weight_layout.h"
#include "checkpoint/dcp/checkpoint_format.h"

namespace megashard {

struct HfToStepOptions {
  std::string hf_dir;    ///< a Hugging Face model directory with safetensors
  std::string save_dir;  ///< gets release/, and the tracker unless that names an iteration
  CheckpointFormat format = CheckpointFormat::kTorchDcp;
  /// A weight whose name begins with hf_prefix gets the key "model." + dcp_prefix + the rest; any
  /// other one "model." + its name.
  std::string dcp_prefix;
  std::string hf_prefix;
  /// Before that: a weight's name to the one in the model; null: the same.
  std::function<std::string(const std::string&)> rename{};
  /// Then: the step's weights, by their keys, in the shapes that the model has; null: as they are.
  std::function<TensorStream(TensorStream)> reshape{};
  /// (target, source): the weight `source` is stored as `target` too, for models that train tied
  /// weights apart.
  std::vector<std::pair<std::string, std::string>> tie_weight_mapping;
  /// Parts of names: stacked experts [E, I, O] of such names are stored as [E * I, O].
  std::vector<std::string> fused_linear_names;
  bool to_bf16 = false;  ///< floating weights as bfloat16; otherwise as they are stored
  /// Looks at the weights of the files, and those of tie_weight_mapping, before any is read; throws
  /// to refuse them. Null: nobody looks.
  std::function<void(const std::vector<TensorInfo>& weights)> check{};
  bool overwrite = false;                         ///< a release that is there
  const WeightLayout* megatron_layout = nullptr;  ///< null: names stay as they are
};

/// Writes SAVE_DIR/release as MindSpeed-MM's hf_to_dcp does: one .distcp file for each safetensors
/// file, and checkpoint_version 3.0; with a layout also Megatron's args. One tensor at a time is in
/// memory. The step appears whole, or not at all.
void convert_hf_to_step(const HfToStepOptions& options, const ConvertProgress& progress);

}  // namespace megashard
