// LFM2, dense and with experts: gated short convolutions, and attention in some layers.
#include <algorithm>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"
#include "models/layers/short_conv.h"

namespace megashard {
namespace {

DecoderConfig read_convolutional(const HfConfig& config, const char* prefix, int64_t intermediate_size) {
  auto network = read_decoder(config, {.names = class_names(prefix),
                                       .kv_heads = 8,
                                       .max_positions = 128000,
                                       .intermediate_size = intermediate_size,
                                       .rotary = {.theta = 1e6},
                                       .pad_token_id = 0});
  config.require_computed(network.activation == Activation::kSilu, "hidden_act must be silu in this family");
  network.norm_eps = config.get("norm_eps", 1e-5);
  network.tie_word_embeddings = config.get_either("tie_embedding", "tie_word_embeddings", true);
  network.attention_dropout = 0;  // transformers' class has none
  network.qk_norm = true;
  return network;
}

/// The MLP has the width of the file, or two thirds of it, times a factor, rounded up to a multiple.
DecoderConfig read_lfm2(const HfConfig& config) {
  auto network = read_convolutional(config, "Lfm2", 12288);
  auto& width = network.intermediate_size;
  width = config.get_either<int64_t>("block_ff_dim", "intermediate_size", 12288);
  if (!config.get("block_auto_adjust_ff_dim", true)) return network;
  const auto factor = config.get("block_ffn_dim_multiplier", 1.0);
  const auto multiple = config.get<int64_t>("block_multiple_of", 256);
  TORCH_CHECK(width > 0 && factor > 0 && multiple > 0, config.path(),
              ": intermediate_size, block_ffn_dim_multiplier and block_multiple_of must be positive");
  width = static_cast<int64_t>(factor * static_cast<double>(2 * width / 3));
  width = (width + multiple - 1) / multiple * multiple;
  return network;
}

DecoderConfig read_lfm2_moe(const HfConfig& config) {
  auto network = read_convolutional(config, "Lfm2Moe", 7168);
  network.moe = read_moe(config, {.num_experts = 32, .experts_per_token = 4, .intermediate_size = 1792});
  network.moe.aux_loss_coef = 0;  // transformers' class has none
  network.moe.router = {.score = RouterConfig::Score::kSigmoid,
                        .corrects_choice = config.get("use_expert_bias", true),
                        .normalise_weights = config.get("norm_topk_prob", true),
                        .normalise_eps = 1e-6,
                        .scale = config.get("routed_scaling_factor", 1.0)};
  network.moe.sparse_step = 1;
  network.moe.dense_layers.clear();
  for (int64_t layer = 0; layer < config.get<int64_t>("num_dense_layers", 2) && layer < network.num_layers; ++layer)
    network.moe.dense_layers.push_back(layer);
  return network;
}

/// layer_types says which layers have attention, or full_attn_idxs; without both all have.
bool has_attention(const HfConfig& config, int64_t num_layers, int64_t index) {
  const auto listed = config.get_or_null("full_attn_idxs", std::vector<int64_t>{});
  const bool by_list = config.find("full_attn_idxs") == nullptr || std::ranges::count(listed, index) > 0;
  if (config.find("layer_types") == nullptr) return by_list;
  const bool by_type = read_layer_type(config, {"conv", "full_attention"}, num_layers, index) == "full_attention";
  TORCH_CHECK(by_list == by_type || config.find("full_attn_idxs") == nullptr, config.path(),
              ": full_attn_idxs and layer_types differ: keep the one that is right");
  return by_type;
}

LayerSpec lfm2_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  auto &mixer = layer.branches[0], &mlp = layer.branches[1];
  mlp.name = "feed_forward";
  mixer.before->name = "operator_norm";
  mlp.before->name = "ffn_norm";
  if (has_attention(config, network.num_layers, index)) return layer;
  const auto width = config.get<int64_t>("conv_L_cache", 3);
  TORCH_CHECK(width > 0, config.path(), ": conv_L_cache ", width, " must be positive");
  mixer.name = "conv";
  mixer.part = short_conv_part({.class_name = network.names.class_of("ShortConv"),
                                .hidden_size = network.hidden_size,
                                .width = width,
                                .bias = config.get("conv_bias", false),
                                .output_init_scale = network.output_init_scale});
  return layer;
}

const WeightFiles kFiles = {.renamings = {{"feed_forward.gate_proj.", "feed_forward.w1."},
                                          {"feed_forward.up_proj.", "feed_forward.w3."},
                                          {"feed_forward.down_proj.", "feed_forward.w2."},
                                          {"feed_forward.gate.e_score_correction_bias", "feed_forward.expert_bias"},
                                          {"self_attn.o_proj.", "self_attn.out_proj."},
                                          {"self_attn.q_norm.", "self_attn.q_layernorm."},
                                          {"self_attn.k_norm.", "self_attn.k_layernorm."},
                                          {"model.norm.", "model.embedding_norm."}},
                            .experts = {.gate = "w1", .up = "w3", .down = "w2"}};

const RegisterFamily kLfm2({.model_type = "lfm2",
                            .architecture = "Lfm2ForCausalLM",
                            .read = read_lfm2,
                            .layer = lfm2_layer,
                            .weight_files = kFiles});

const RegisterFamily kLfm2Moe({.model_type = "lfm2_moe",
                               .architecture = "Lfm2MoeForCausalLM",
                               .read = read_lfm2_moe,
                               .layer = lfm2_layer,
                               .weight_files = kFiles});

}  // namespace
}  // namespace megashard
