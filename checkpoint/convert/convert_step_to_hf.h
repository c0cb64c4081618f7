#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/convert/weight_layout.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/step_names.h"

namespace megashard {

struct StepToHfOptions {
  std::string load_dir;                                   ///< a step folder: .../iter_0000100 or .../release
  CheckpointFormat format = CheckpointFormat::kTorchDcp;  ///< of the step
  std::string save_dir;                                   ///< gets the safetensors and the assets
  std::string model_assets_dir;                           ///< its config and tokenizer files are copied; empty: none
  /// Names of the model to write; a step that has other keys is read by them (step_names.h). Empty if unknown.
  ModelNames names{};
  /// A key that begins with "model." + dcp_prefix is named hf_prefix + the rest; any other one of
  /// the model what stands behind "model.".
  std::string dcp_prefix;
  std::string hf_prefix;
  /// After that: a name in the model to the weight's; null: the same.
  std::function<std::string(const std::string&)> rename{};
  /// Before all that: the step's weights, by their keys, in the shapes of the files; null: as they
  /// are.
  std::function<TensorStream(TensorStream)> reshape{};
  /// Parts of names: matrices [E * I, O] of such names are written as stacked experts [E, I, O], E
  /// being num_experts of the assets' config.json. The name ends so, or lies below "experts.".
  std::vector<std::string> fused_linear_names;
  bool to_bf16 = false;
  const WeightLayout* megatron_layout = nullptr;  ///< that the step has; null: names stay
  /// Looks at the weights under the names and in the sizes of the files, before any is read; throws
  /// to refuse them. Null: nobody looks.
  std::function<void(const std::vector<TensorInfo>& weights)> check{};
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
};

/// Writes the model of a step as a Hugging Face model directory (MindSpeed-MM's
/// dcp_to_hf). Optimizer state and values are left out. Where the assets' config.json ties lm_head
/// to the embeddings and the step holds both: equal ones are written once, different ones make the
/// written config.json say that they are not tied. Every byte of the step is checked first. What
/// is in save_dir is replaced as save_hf_weights does, weights and assets together (whoever wants
/// to keep it asks folder_refusal).
void convert_step_to_hf(const StepToHfOptions& options, const ConvertProgress& progress);

}  // namespace megashard
