// Kimi Linear: Kimi Delta Attention, and latent attention without positions in every fourth layer; experts.
#include <algorithm>
#include <utility>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"
#include "models/layers/kimi_delta_attention.h"

namespace megashard {
namespace {

/// Published files have the keys of linear attention in an object.
HfConfig linear_config(const HfConfig& config) {
  return config.object("linear_attn_config").value_or(HfConfig(nlohmann::ordered_json::object(), config.path()));
}

int64_t read_linear(const HfConfig& config, const char* published, const char* key, int64_t fallback) {
  const auto value = config.get(key, fallback), other = linear_config(config).get(published, value);
  TORCH_CHECK(value == other || config.find(key) == nullptr, config.path(), ": ", key, " says ", value,
              " and linear_attn_config.", published, " says ", other, ": keep the one that is right");
  TORCH_CHECK(other > 0, config.path(), ": ", key, " (linear_attn_config.", published, ") ", other,
              " must be positive");
  return other;
}

DecoderConfig read_kimi_linear(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("KimiLinear"),
                                       .head_dim = 64,
                                       .intermediate_size = 9216,
                                       .norm_eps = 1e-5,
                                       .head_dim_key = "qk_rope_head_dim",
                                       .pad_token_id = 163839});
  network.max_positions = config.get_either<int64_t>("model_max_length", "max_position_embeddings", 1048576);
  config.require_computed(!network.tie_word_embeddings,
                          "tie_word_embeddings must be false: transformers' class does not tie them");
  network.positions = PositionKind::kNone;
  network.rotary = {};
  read_latent(config, network, {.key_rank = 512, .plain_dim = 128, .value_dim = 128});
  network.names.moe = "KimiLinearMoE";
  network.names.router = "KimiLinearTopkRouter";
  network.moe = read_grouped_moe(config,
                                 {.num_experts = 256,
                                  .experts_per_token = 8,
                                  .intermediate_size = 1024,
                                  .scale = 2.446,
                                  .experts_keys = {"num_experts", "num_local_experts"},
                                  .per_token_keys = {"num_experts_per_token", "num_experts_per_tok"},
                                  .shared_keys = {"num_shared_experts", "n_shared_experts"},
                                  .groups_keys = {"num_expert_group", "n_group"},
                                  .normalises_keys = {"moe_renormalize", "norm_topk_prob"}},
                                 network.num_layers);
  if (config.find("mlp_layer_types") == nullptr) return network;
  const auto published = std::exchange(network.moe.dense_layers, {});
  for (int64_t layer = 0; layer < network.num_layers; ++layer) {
    if (read_layer_type(config, {"dense", "sparse"}, network.num_layers, layer, "mlp_layer_types") == "dense")
      network.moe.dense_layers.push_back(layer);
  }
  TORCH_CHECK(config.find("first_k_dense_replace") == nullptr || network.moe.dense_layers == published, config.path(),
              ": first_k_dense_replace and mlp_layer_types differ: keep the one that is right");
  return network;
}

/// layer_types says which layers are linear, or linear_attn_config, which counts layers from 1; without both all but
/// every fourth behind the first.
bool is_linear_layer(const HfConfig& config, int64_t num_layers, int64_t index) {
  const auto published = linear_config(config);
  const auto listed = [&](const char* key) {
    const auto layers = published.get_or_null(key, std::vector<int64_t>{});
    return std::ranges::count(layers, index + 1) > 0;
  };
  const bool lists = published.find("full_attn_layers") != nullptr && published.find("kda_layers") != nullptr;
  TORCH_CHECK(!lists || listed("full_attn_layers") != listed("kda_layers"), config.path(),
              ": linear_attn_config must have layer ", index + 1, " in one of full_attn_layers and kda_layers");
  if (config.find("layer_types") == nullptr) return lists ? listed("kda_layers") : index == 0 || index % 4 != 0;
  const bool by_type =
      read_layer_type(config, {"full_attention", "linear_attention"}, num_layers, index) == "linear_attention";
  TORCH_CHECK(!lists || by_type == listed("kda_layers"), config.path(),
              ": linear_attn_config and layer_types differ: keep the one that is right");
  return by_type;
}

LayerSpec kimi_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  if (!is_linear_layer(config, network.num_layers, index)) return layer;
  const auto width = read_linear(config, "head_dim", "linear_head_dim", 128);
  layer.branches[0].part = kimi_delta_attention_part(
      {.class_name = "KimiLinearDeltaAttention",
       .hidden_size = network.hidden_size,
       .heads = read_linear(config, "num_heads", "linear_num_heads", 32),
       .head_dim = width,
       .conv_width = read_linear(config, "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
       .activation = network.activation,
       .norm = {.class_name = "KimiLinearRMSNormGated", .width = width, .eps = network.norm_eps, .in_fp32 = true},
       .output_init_scale = network.output_init_scale});
  return layer;
}

const RegisterFamily kKimiLinear({.model_type = "kimi_linear",
                                  .architecture = "KimiLinearForCausalLM",
                                  .read = read_kimi_linear,
                                  .layer = kimi_layer,
                                  .weight_files = {.renamings = {{"mlp.", "block_sparse_moe."}},
                                                   .experts = {.gate = "w1", .up = "w3", .down = "w2"}}});

}  // namespace
}  // namespace megashard
