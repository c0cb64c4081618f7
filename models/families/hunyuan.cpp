#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Norms of queries and keys behind the rotation.
DecoderConfig read_hunyuan_dense(const HfConfig& config) {
  config.need<int64_t>("head_dim");  // transformers has no default
  auto network = read_decoder(
      config, {.names = class_names("HunYuanDenseV1"), .max_positions = 2048, .norm_eps = 1e-5, .pad_token_id = 0});
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.qk_norm = network.qk_norm_behind_rotation = true;
  require_no_windows(config, network);
  auto& rotary = network.rotary;
  if (rotary.kind != RotaryConfig::Kind::kDynamic) return network;
  // With alpha the positions do not depend on the length.
  const double alpha = config.get(position_keys(config), "alpha", 0.0);
  TORCH_CHECK(alpha >= 0, config.path(), ": alpha of rope_scaling or rope_parameters must be positive, got ", alpha);
  if (alpha == 0) return network;
  const auto channels = static_cast<double>(network.head_dim);
  rotary.kind = RotaryConfig::Kind::kDefault;
  rotary.theta *= std::pow(alpha, channels / (channels - 2));
  return network;
}

const RegisterFamily kHunYuanDense({.model_type = "hunyuan_v1_dense",
                                    .architecture = "HunYuanDenseV1ForCausalLM",
                                    .read = read_hunyuan_dense,
                                    .weight_files = {
                                        .renamings = {{"self_attn.q_norm.", "self_attn.query_layernorm."},
                                                      {"self_attn.k_norm.", "self_attn.key_layernorm."}}}});

}  // namespace
}  // namespace megashard
