#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/step_names.h"
#include "checkpoint/hugging_face/hf_files.h"

namespace megashard {

struct StepToHfOptions {
  std::string load_dir;                                   ///< a step folder: .../iter_0000100 or .../release
  CheckpointFormat format = CheckpointFormat::kTorchDcp;  ///< format of the step
  std::string save_dir;                                   ///< receives the safetensors and the assets
  std::string model_assets_dir;                           ///< its config and tokenizer files are copied; empty: none
  /// Names of the weights to write; they locate them in a step with other keys (step_names.h). Empty if unknown.
  ModelNames names{};
  /// A key that begins with "model." + dcp_prefix becomes hf_prefix + the rest; other model keys lose "model.".
  std::string dcp_prefix;
  std::string hf_prefix;
  /// How files have the model's weights. Its published forms are made before the prefixes are converted, its names
  /// after them.
  WeightMap weights{};
  /// Name parts of matrices [E * I, O] to write as stacked experts [E, I, O], where E is num_experts in the assets'
  /// config.json. They match names that end with them or that lie below "experts.".
  std::vector<std::string> fused_linear_names;
  bool to_bf16 = false;
  const MegatronLayout* megatron_layout = nullptr;  ///< layout of the step; null: names are kept
  /// Checks the weights, with names and sizes as in the files, before any is read; throws to refuse them. Null: no
  /// check.
  std::function<void(const std::vector<TensorInfo>& weights)> check{};
  std::function<void(nlohmann::ordered_json& config)> change_config{};  ///< changes config.json; null: as it is
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
  std::string stem = HfSaveOptions().stem;  ///< stem of the weights' file names
};

/// Writes the model of a step as a Hugging Face model directory (MindSpeed-MM's dcp_to_hf). Optimizer state and values
/// are left out. If the assets' config.json ties lm_head to the embeddings and the step holds both: equal weights are
/// written once; if they differ, the written config.json declares them untied. Verifies every byte of the step first.
/// Replaces weights and assets in save_dir together, as save_hf_weights does (call folder_refusal to protect them).
void convert_step_to_hf(const StepToHfOptions& options, const ConvertProgress& progress);

}  // namespace megashard
