#include "models/families/qwen3_hybrid.h"

#include <nlohmann/json.hpp>

#include "models/layers/gated_delta_net.h"

namespace megashard {

DecoderConfig read_hybrid(const HfConfig& config, DecoderDefaults defaults) {
  defaults.head_dim = 256;
  defaults.rotary.fraction = 0.25;
  defaults.rotates_partially = true;
  auto network = read_decoder(config, defaults);
  config.require_computed(network.activation == Activation::kSilu,
                          "hidden_act must be silu, which the linear layers' convolution has");
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.zero_centered_norm = network.qk_norm = network.attention_gate = true;
  return network;
}

MoeConfig read_gated_experts(const HfConfig& config, const MoeDefaults& defaults) {
  auto moe = read_moe(config, defaults);
  moe.shared = {.intermediate_size = config.get<int64_t>("shared_expert_intermediate_size", 512),
                .gated = true,
                .name = "shared_expert"};
  return moe;
}

namespace {

/// layer_types says which layers are linear; without it all but every full_attention_interval-th.
bool is_linear(const HfConfig& config, int64_t num_layers, int64_t index) {
  if (config.find("layer_types") == nullptr || config.find("layer_types")->empty())
    return (index + 1) % config.get<int64_t>("full_attention_interval", 4) != 0;
  return read_layer_type(config, {"full_attention", "linear_attention"}, num_layers, index) == "linear_attention";
}

}  // namespace

LayerSpec hybrid_layer(const HfConfig& config, const DecoderConfig& network, int64_t index, bool packed) {
  auto layer = decoder_layer(network, index);
  if (!is_linear(config, network.num_layers, index)) return layer;
  GatedDeltaNetSpec mixer{.class_name = network.names.class_of("GatedDeltaNet"),
                          .hidden_size = network.hidden_size,
                          .key_heads = config.get<int64_t>("linear_num_key_heads", 16),
                          .value_heads = config.get<int64_t>("linear_num_value_heads", 32),
                          .key_dim = config.get<int64_t>("linear_key_head_dim", 128),
                          .value_dim = config.get<int64_t>("linear_value_head_dim", 128),
                          .conv_width = config.get<int64_t>("linear_conv_kernel_dim", 4),
                          .packed = packed,
                          .output_init_scale = network.output_init_scale};
  TORCH_CHECK(mixer.key_heads > 0 && mixer.value_heads > 0 && mixer.value_heads % mixer.key_heads == 0 &&
                  mixer.key_dim > 0 && mixer.value_dim > 0 && mixer.conv_width > 0,
              config.path(), ": linear_num_value_heads ", mixer.value_heads,
              " must be a multiple of linear_num_key_heads ", mixer.key_heads,
              ", and these, linear_key_head_dim, linear_value_head_dim and linear_conv_kernel_dim positive");
  mixer.norm = {
      .class_name = network.names.class_of("RMSNormGated"), .width = mixer.value_dim, .eps = network.norm_eps};
  layer.branches[0].name = "linear_attn";
  layer.branches[0].part = gated_delta_net_part(std::move(mixer));
  return layer;
}

}  // namespace megashard
