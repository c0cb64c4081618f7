#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Chunks in the layers of layer_types, otherwise in those with positions.
void read_chunks(const HfConfig& config, DecoderConfig& network) {
  network.attention_chunk = read_positive(config, "attention_chunk_size", 8192);
  network.chunked_layers = layers_where(network.num_layers, [&](int64_t layer) {
    if (config.find("layer_types") == nullptr) return network.is_rotated(layer);
    return read_layer_type(config, {"full_attention", "chunked_attention"}, network.num_layers, layer) !=
           "full_attention";
  });
}

/// Experts in the layers of moe_layers, otherwise in every interleave_moe_layer_step-th.
void read_experts(const HfConfig& config, DecoderConfig& network) {
  auto& moe = network.moe;
  moe = read_moe(
      config,
      {.num_experts = 16, .experts_per_token = 1, .intermediate_key = "intermediate_size", .intermediate_size = 8192});
  moe.router = {.name = "router", .score = RouterConfig::Score::kSigmoid};
  moe.shared = {.intermediate_size = moe.intermediate_size, .name = "shared_expert"};
  moe.weighs_inputs = true;
  moe.aux_loss_coef = 0;  // transformers' class has none
  moe.sparse_step = 1;
  const auto step = read_positive(config, "interleave_moe_layer_step", 1);
  const auto listed = config.get_or_null("moe_layers", std::vector<int64_t>{});
  moe.dense_layers = layers_where(network.num_layers, [&](int64_t layer) {
    return config.find("moe_layers") == nullptr ? (layer + 1) % step != 0 : std::ranges::count(listed, layer) == 0;
  });
  network.intermediate_size = read_positive(config, "intermediate_size_mlp", 16384);
}

DecoderConfig read_llama4(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Llama4Text"),
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .max_positions = 131072,
                                       .intermediate_size = 8192,
                                       .norm_eps = 1e-5,
                                       .rotary = {.theta = 500000, .interleaved = true}});
  network.names.model = "Llama4ForCausalLM";
  network.unrotated_layers = read_unrotated_layers(config, network.num_layers);
  read_chunks(config, network);
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.qk_norm = config.get("use_qk_norm", true);
  network.qk_norm_behind_rotation = true;
  network.qk_norm_weight = false;
  if (config.get("attn_temperature_tuning", true)) {
    network.temperature = {.beta = config.get("attn_scale", 0.1),
                           .length = static_cast<double>(read_positive(config, "floor_scale", 8192)),
                           .offset = 1,
                           .unrotated_only = true,
                           .rounded = false};
  }
  read_experts(config, network);
  network.names.moe = "Llama4TextMoe";
  network.names.router = "Llama4Router";
  return network;
}

LayerSpec llama4_layer(const HfConfig& /*config*/, const DecoderConfig& network, int64_t index) {
  auto described = network;
  described.qk_norm = network.qk_norm && network.is_rotated(index);
  auto layer = decoder_layer(described, index);
  layer.branches[1].name = "feed_forward";
  return layer;
}

const RegisterFamily kLlama4({.model_type = "llama4_text",
                              .architecture = "Llama4ForCausalLM",
                              .read = read_llama4,
                              .layer = llama4_layer,
                              .weight_files = {.experts = {.form = ExpertFiles::Form::kTransposed, .only = true}}});

}  // namespace
}  // namespace megashard
