#include <algorithm>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_smollm3(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("SmolLM3"),
                                       .kv_heads = 4,
                                       .rotary = {.theta = 2e6},
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 128004});
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.mlp_bias = config.get("mlp_bias", false);
  network.unrotated_layers = read_unrotated_layers(config, network.num_layers);
  const bool windows = config.get("use_sliding_window", false) && config.find("sliding_window") != nullptr;
  network.sliding_window = windows ? read_sliding_window(config, 0) : 0;
  network.sliding_layers = read_sliding_layers(config, network, [&](int64_t layer) {
    return windows && std::ranges::count(network.unrotated_layers, layer) > 0;
  });
  return network;
}

const RegisterFamily kSmolLm3({.model_type = "smollm3", .architecture = "SmolLM3ForCausalLM", .read = read_smollm3});

}  // namespace
}  // namespace megashard
