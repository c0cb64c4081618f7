#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/convert_hf_to_dcp.h"

namespace megashard {

struct DcpToHfOptions {
  std::string load_dir;          ///< a step folder: .../iter_0000100 or .../release
  std::string save_dir;          ///< gets the safetensors and the assets
  std::string model_assets_dir;  ///< its config and tokenizer files are copied; empty: none
  std::string dcp_prefix;        ///< only keys that begin with "model." + dcp_prefix are taken,
  std::string hf_prefix;         ///< and named hf_prefix + the rest
  bool to_bf16 = false;
  int64_t most_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
};

/// Writes the model of a torch_dcp step as a Hugging Face model directory (MindSpeed-MM's
/// dcp_to_hf). Optimizer state and values are left out. Where the assets' config.json ties lm_head
/// to the embeddings and the step holds both: equal ones are written once, different ones make the
/// written config.json say that they are not tied.
void convert_dcp_to_hf(const DcpToHfOptions& options, const ConvertProgress& progress);

}  // namespace megashard
