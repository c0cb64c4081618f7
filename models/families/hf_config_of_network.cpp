#include "models/families/hf_config_of_network.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "models/families/model_family.h"

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;

Json rope_scaling(const RotaryConfig& rotary) {
  if (rotary.kind == RotaryConfig::Kind::kDefault) return nullptr;
  Json scaling;
  scaling["rope_type"] = rotary.kind == RotaryConfig::Kind::kLinear ? "linear" : "llama3";
  scaling["factor"] = rotary.factor;
  if (rotary.kind == RotaryConfig::Kind::kLinear) return scaling;
  scaling["low_freq_factor"] = rotary.low_freq_factor;
  scaling["high_freq_factor"] = rotary.high_freq_factor;
  scaling["original_max_position_embeddings"] = std::llround(rotary.original_max_positions);
  return scaling;
}

Json common_fields(const ModelFamily& family, const DecoderConfig& network) {
  Json config;
  config["architectures"] = {family.architecture};
  config["model_type"] = family.model_type;
  config["vocab_size"] = network.vocab_size;
  config["hidden_size"] = network.hidden_size;
  config["intermediate_size"] = network.intermediate_size;
  config["num_hidden_layers"] = network.num_layers;
  config["num_attention_heads"] = network.num_heads;
  config["num_key_value_heads"] = network.num_kv_heads;
  config["head_dim"] = network.head_dim;
  config["max_position_embeddings"] = network.max_positions;
  config["hidden_act"] = "silu";
  config["rms_norm_eps"] = network.norm_eps;
  config["rope_theta"] = network.rotary.theta;
  config["rope_scaling"] = rope_scaling(network.rotary);
  config["attention_dropout"] = network.attention_dropout;
  config["initializer_range"] = network.init_std;
  config["bos_token_id"] = nullptr;  // depends on the text; unknown in training
  config["eos_token_id"] = nullptr;
  return config;
}

}  // namespace

std::optional<Json> hf_config_of_network(const DecoderConfig& network) {
  const bool known = network.norm == NormKind::kRmsNorm && !network.zero_centered_norm && network.gated_mlp &&
                     network.positions == PositionKind::kRotary && network.rotary.fraction == 1;
  if (!known) return std::nullopt;
  for (const auto& family : model_families()) {
    const auto switches = family.write_switches == nullptr ? std::nullopt : family.write_switches(network);
    if (!switches) continue;
    auto config = common_fields(family, network);
    config.update(*switches);
    return config;
  }
  return std::nullopt;
}

}  // namespace megashard
