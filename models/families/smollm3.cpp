#include <algorithm>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// no_rope_layers says 1 for layers with positions; without it every no_rope_layer_interval-th has none.
std::vector<int64_t> read_unrotated_layers(const HfConfig& config, int64_t num_layers) {
  const auto interval = config.get<int64_t>("no_rope_layer_interval", 4);
  const auto rotates = config.get_or_null("no_rope_layers", std::vector<int64_t>{});
  TORCH_CHECK(interval > 0, config.path(), ": no_rope_layer_interval ", interval, " must be positive");
  TORCH_CHECK(config.find("no_rope_layers") == nullptr || std::ssize(rotates) == num_layers, config.path(),
              ": no_rope_layers has ", rotates.size(), " entries for num_hidden_layers ", num_layers);
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const bool turns = rotates.empty() ? (layer + 1) % interval != 0 : rotates[static_cast<size_t>(layer)] != 0;
    if (!turns) layers.push_back(layer);
  }
  return layers;
}

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
