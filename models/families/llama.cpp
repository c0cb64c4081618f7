#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_llama(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Llama"), .max_positions = 2048});
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.mlp_bias = config.get("mlp_bias", false);
  require_no_windows(config, network);
  return network;
}

std::optional<nlohmann::ordered_json> llama_switches(const DecoderConfig& network) {
  const bool fits = !network.qk_norm && network.qkv_bias == network.attention_out_bias &&
                    network.hidden_size % network.num_heads == 0;
  if (!fits) return std::nullopt;
  return nlohmann::ordered_json{{"attention_bias", network.qkv_bias}, {"mlp_bias", network.mlp_bias}};
}

const RegisterFamily kLlama({.model_type = "llama",
                             .architecture = "LlamaForCausalLM",
                             .read = read_llama,
                             .write_switches = llama_switches,
                             .has_megatron_layout = true});

}  // namespace
}  // namespace megashard
