#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Attention and MLP of one norm; only the layers with a window have positions.
DecoderConfig read_cohere2(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Cohere2"),
                                       .max_positions = 8192,
                                       .norm_eps = 1e-5,
                                       .norm_eps_key = "layer_norm_eps",
                                       .rotary = {.interleaved = true},
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  network.names.norm = "Cohere2LayerNorm";
  network.norm = NormKind::kLayerNorm;
  network.norm_bias = false;
  network.parallel_branches = true;
  network.logit_scale = config.get("logit_scale", 0.0625);
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.sliding_window = read_sliding_window(config, 4096);
  const auto pattern = read_positive(config, "sliding_window_pattern", 4);
  network.sliding_layers =
      read_sliding_layers(config, network, [pattern](int64_t layer) { return (layer + 1) % pattern != 0; });
  network.unrotated_layers =
      layers_where(network.num_layers, [&](int64_t layer) { return !network.is_sliding(layer); });
  return network;
}

const RegisterFamily kCohere2({.model_type = "cohere2", .architecture = "Cohere2ForCausalLM", .read = read_cohere2});

}  // namespace
}  // namespace megashard
