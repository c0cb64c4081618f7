// DeepSeek-V3, R1, Moonlight and Kimi K2 (deepseek_v3), and DeepSeek-V2.
#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"
#include "models/layers/latent_attention.h"

namespace megashard {
namespace {

DecoderConfig read_common(const HfConfig& config, const char* prefix, int64_t max_positions) {
  auto network = read_decoder(config, {.names = class_names(prefix),
                                       .head_dim = 64,
                                       .max_positions = max_positions,
                                       .head_dim_key = "qk_rope_head_dim"});
  const auto head_dim = config.get_or_null("head_dim", network.head_dim);
  config.require_computed(head_dim == network.head_dim, "head_dim ", head_dim, " must be qk_rope_head_dim ",
                          network.head_dim, "; take it out");
  TORCH_CHECK(network.num_kv_heads == network.num_heads, config.path(), ": num_key_value_heads ", network.num_kv_heads,
              " must be num_attention_heads ", network.num_heads, ": every head has its own keys and values");
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  require_no_windows(config, network);
  return network;
}

DecoderConfig read_deepseek_v3(const HfConfig& config) {
  auto network = read_common(config, "DeepseekV3", 4096);
  network.rotary.interleaved = config.get("rope_interleave", true);
  network.moe = read_grouped_moe(config,
                                 {.num_experts = 256,
                                  .experts_per_token = 8,
                                  .intermediate_size = 2048,
                                  .dense_layers = 3,
                                  .groups = 8,
                                  .chosen_groups = 4,
                                  .scale = 2.5},
                                 network.num_layers);
  network.names.moe = "DeepseekV3MoE";
  network.names.experts = "DeepseekV3Experts";
  network.names.router = "DeepseekV3TopkRouter";
  return network;
}

DecoderConfig read_deepseek_v2(const HfConfig& config) {
  auto network = read_common(config, "DeepseekV2", 2048);
  network.rotary.interleaved = true;
  network.mlp_bias = config.get("mlp_bias", false);
  network.moe = read_grouped_moe(config,
                                 {.num_experts = 64,
                                  .experts_per_token = 0,  // must be given
                                  .intermediate_size = 1407,
                                  .shared_experts = 2,
                                  .dense_layers = 0},
                                 network.num_layers);
  const auto method = config.get<std::string>("topk_method", "greedy");
  config.require_computed(method == "greedy" || method == "group_limited_greedy", "topk_method ", method,
                          " is not supported; known are greedy and group_limited_greedy");
  auto& router = network.moe.router;
  router = {.in_fp32 = true,
            .scale = router.scale,
            .groups = method == "greedy" ? 1 : router.groups,
            .chosen_groups = method == "greedy" ? 1 : router.chosen_groups,
            .group_score = RouterConfig::GroupScore::kLargest,
            .others_score_zero = true};
  network.names.moe = "DeepseekV2Moe";
  network.names.router = "DeepseekV2TopkRouter";
  return network;
}

/// 1 / sqrt of a key's channels, enlarged for positions that are stretched by YaRN's mscale_all_dim.
double score_scale(const RotaryConfig& rotary, int64_t channels) {
  const bool grows = rotary.mscale_all_dim != 0 && rotary.factor > 1;
  const double mscale = grows ? 0.1 * rotary.mscale_all_dim * std::log(rotary.factor) + 1 : 1;
  return mscale * mscale / std::sqrt(static_cast<double>(channels));
}

LayerSpec latent_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  LatentAttentionSpec attention{
      .class_name = network.names.attention,
      .hidden_size = network.hidden_size,
      .num_heads = network.num_heads,
      .query_rank = config.is_null("q_lora_rank") ? 0 : config.get<int64_t>("q_lora_rank", 1536),
      .key_rank = config.get<int64_t>("kv_lora_rank", 512),
      .plain_dim = config.get<int64_t>("qk_nope_head_dim", 128),
      .rotated_dim = network.head_dim,
      .value_dim = config.get<int64_t>("v_head_dim", 128),
      .bias = network.qkv_bias,
      .latent_norm = {.class_name = network.names.norm, .eps = 1e-6},
      .neighbours = network.rotary.interleaved,
      .dropout = network.attention_dropout,
      .output_init_scale = network.output_init_scale};
  TORCH_CHECK(attention.query_rank >= 0 && attention.key_rank > 0 && attention.plain_dim > 0 && attention.value_dim > 0,
              config.path(), ": q_lora_rank, kv_lora_rank, qk_nope_head_dim and v_head_dim must be positive");
  attention.scale = score_scale(network.rotary, attention.key_dim());
  auto layer = decoder_layer(network, index);
  layer.branches[0].part = latent_attention_part(std::move(attention));
  return layer;
}

const RegisterFamily kDeepseekV3({.model_type = "deepseek_v3",
                                  .architecture = "DeepseekV3ForCausalLM",
                                  .read = read_deepseek_v3,
                                  .layer = latent_layer});

const RegisterFamily kDeepseekV2({.model_type = "deepseek_v2",
                                  .architecture = "DeepseekV2ForCausalLM",
                                  .read = read_deepseek_v2,
                                  .layer = latent_layer});

}  // namespace
}  // namespace megashard
