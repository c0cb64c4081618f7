#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_dense_or_sparse(const HfConfig& config, const DecoderDefaults& defaults) {
  auto network = read_decoder(config, defaults);
  network.qk_norm = true;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  return network;
}

DecoderConfig read_qwen3(const HfConfig& config) {
  auto network = read_dense_or_sparse(config, {.names = class_names("Qwen3"), .kv_heads = 32, .head_dim = 128});
  read_optional_windows(config, network);
  return network;
}

std::optional<nlohmann::ordered_json> qwen3_switches(const DecoderConfig& network) {
  const bool fits = network.qk_norm && network.qkv_bias == network.attention_out_bias && !network.mlp_bias;
  if (!fits) return std::nullopt;
  return nlohmann::ordered_json{{"attention_bias", network.qkv_bias}};
}

/// A window applies to all layers: transformers' Qwen3MoeAttention does not read layer_types, which must be consistent.
DecoderConfig read_qwen3_moe(const HfConfig& config) {
  auto network = read_dense_or_sparse(config, {.names = class_names("Qwen3Moe"), .kv_heads = 4});
  network.moe = read_moe(config);
  network.sliding_window = config.get("use_sliding_window", false) ? read_sliding_window(config, 4096) : 0;
  slide_all_or_no_layers(config, network);
  return network;
}

std::optional<nlohmann::ordered_json> qwen3_moe_switches(const DecoderConfig& network) {
  const auto& moe = network.moe;
  const auto& router = moe.router;
  const bool normalises = router.normalise_weights || router.score == RouterConfig::Score::kLogit;
  const bool fits = moe.num_experts > 0 && router.score != RouterConfig::Score::kSigmoid && router.groups == 1 &&
                    router.scale == 1 && !router.in_fp32 && moe.shared.intermediate_size == 0;
  auto switches = qwen3_switches(network);
  if (!fits || !switches) return std::nullopt;
  switches->update({{"num_experts", moe.num_experts},
                    {"num_experts_per_tok", moe.experts_per_token},
                    {"moe_intermediate_size", moe.intermediate_size},
                    {"norm_topk_prob", normalises},
                    {"decoder_sparse_step", moe.sparse_step},
                    {"mlp_only_layers", moe.dense_layers}});
  return switches;
}

const RegisterFamily kQwen3({.model_type = "qwen3",
                             .architecture = "Qwen3ForCausalLM",
                             .read = read_qwen3,
                             .write_switches = qwen3_switches,
                             .has_megatron_layout = true});

const RegisterFamily kQwen3Moe({.model_type = "qwen3_moe",
                                .architecture = "Qwen3MoeForCausalLM",
                                .read = read_qwen3_moe,
                                .write_switches = qwen3_moe_switches});

}  // namespace
}  // namespace megashard
