#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Sets the positions of transformers' class if config.json says none.
void read_default_positions(const HfConfig& config, DecoderConfig& network) {
  if (config.find("rope_parameters") != nullptr || config.find("rope_scaling") != nullptr) return;
  auto& rotary = network.rotary;
  rotary.kind = RotaryConfig::Kind::kYarn;
  rotary.factor = 32;
  rotary.original_max_positions = 4096;
  rotary.truncate = false;
  rotary.magnitude = 0.1 * std::log(rotary.factor) + 1;
}

DecoderConfig read_gpt_oss(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("GptOss"),
                                       .kv_heads = 8,
                                       .head_dim = 64,
                                       .max_positions = 131072,
                                       .intermediate_size = 2880,
                                       .norm_eps = 1e-5,
                                       .rotary = {.theta = 150000}});
  read_default_positions(config, network);
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", true);
  network.attention_sinks = true;
  network.sliding_window = read_sliding_window(config, 128);
  network.sliding_layers = read_sliding_layers(config, network, [](int64_t layer) { return layer % 2 == 0; });
  network.moe = read_moe(
      config,
      {.num_experts = 128, .experts_per_token = 4, .intermediate_key = "intermediate_size", .intermediate_size = 2880});
  network.moe.router = {.name = "router", .score = RouterConfig::Score::kLogit, .bias = true};
  network.moe.bias = true;
  network.moe.clamped = {.alpha = config.get("swiglu_alpha", 1.702), .limit = config.get("swiglu_limit", 7.0)};
  network.names.moe = "GptOssMLP";
  return network;
}

const RegisterFamily kGptOss({.model_type = "gpt_oss",
                              .architecture = "GptOssForCausalLM",
                              .read = read_gpt_oss,
                              .weight_files = {.experts = {.form = ExpertFiles::Form::kInterleaved}}});

}  // namespace
}  // namespace megashard
