#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

/// Takes one line about how far a conversion is.
using ConvertProgress = std::function<void(const std::string& line)>;

struct HfToDcpOptions {
  std::string hf_dir;      ///< a Hugging Face model directory with safetensors
  std::string dcp_dir;     ///< gets release/ and the tracker
  std::string dcp_prefix;  ///< keys are "model." + dcp_prefix + the name behind hf_prefix
  std::string hf_prefix;   ///< only weights whose names begin so are taken
  /// (target, source): the weight `source` is stored as `target` too, for models that train tied
  /// weights apart.
  std::vector<std::pair<std::string, std::string>> tie_weight_mapping;
  bool to_bf16 = false;  ///< floating weights as bfloat16; otherwise as they are stored
};

/// Writes DCP_DIR/release as MindSpeed-MM's hf_to_dcp does: one .distcp file for each safetensors
/// file, and checkpoint_version 3.0. One tensor at a time is in memory. The step appears whole, or
/// not at all.
void convert_hf_to_dcp(const HfToDcpOptions& options, const ConvertProgress& progress);

}  // namespace megashard
