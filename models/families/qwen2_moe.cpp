#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Without layer_types every second of the first max_window_layers slides, as in transformers' class.
void read_windows(const HfConfig& config, DecoderConfig& network) {
  const auto first = config.get<int64_t>("max_window_layers", 28);
  network.sliding_window = config.get("use_sliding_window", false) ? read_sliding_window(config, 4096) : 0;
  network.sliding_layers = read_sliding_layers(
      config, network, [&](int64_t layer) { return network.sliding_window > 0 && layer < first && layer % 2 == 0; });
}

DecoderConfig read_qwen2_moe(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Qwen2Moe"), .kv_heads = 16});
  network.qkv_bias = config.get("qkv_bias", true);
  read_windows(config, network);
  network.moe = read_moe(config, {.num_experts = 60, .experts_per_token = 4, .intermediate_size = 1408});
  network.moe.shared = {.intermediate_size = config.get<int64_t>("shared_expert_intermediate_size", 5632),
                        .gated = true,
                        .name = "shared_expert"};
  return network;
}

const RegisterFamily kQwen2Moe({.model_type = "qwen2_moe",
                                .architecture = "Qwen2MoeForCausalLM",
                                .read = read_qwen2_moe});

}  // namespace
}  // namespace megashard
