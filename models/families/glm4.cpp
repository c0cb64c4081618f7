#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// GLM-4-0414 and GLM-Z1: norms around attention and MLP; half of a head turns, in pairs of neighbours.
DecoderConfig read_glm4(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Glm4"),
                                       .kv_heads = 2,
                                       .head_dim = 128,
                                       .max_positions = 131072,
                                       .norm_eps = 1.5625e-7,
                                       .rotary = {.fraction = 0.5, .interleaved = true},
                                       .rotates_partially = true,
                                       .pad_token_id = 151329});
  network.sandwich_norms = true;
  network.qkv_bias = config.get("attention_bias", true);
  require_no_windows(config, network);
  return network;
}

LayerSpec glm4_layer(const HfConfig& /*config*/, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  layer.branches[0].after->name = "post_self_attn_layernorm";
  layer.branches[1].before->name = "post_attention_layernorm";
  layer.branches[1].after->name = "post_mlp_layernorm";
  return layer;
}

const RegisterFamily kGlm4({.model_type = "glm4",
                            .architecture = "Glm4ForCausalLM",
                            .read = read_glm4,
                            .layer = glm4_layer,
                            .weight_files = {.fused = {.gate_up = "gate_up_proj"}}});

}  // namespace
}  // namespace megashard
