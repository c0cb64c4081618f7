#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_qwen2(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Qwen2"), .kv_heads = 32});
  network.qkv_bias = true;
  read_optional_windows(config, network);
  return network;
}

std::optional<nlohmann::ordered_json> qwen2_switches(const DecoderConfig& network) {
  const bool fits = !network.qk_norm && network.qkv_bias && !network.attention_out_bias && !network.mlp_bias;
  if (!fits) return std::nullopt;
  return nlohmann::ordered_json::object();
}

const RegisterFamily kQwen2({.model_type = "qwen2",
                             .architecture = "Qwen2ForCausalLM",
                             .read = read_qwen2,
                             .write_switches = qwen2_switches,
                             .has_megatron_layout = true});

}  // namespace
}  // namespace megashard
