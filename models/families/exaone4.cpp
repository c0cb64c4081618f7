#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Norms behind attention and MLP; with a window only the sliding layers have positions.
DecoderConfig read_exaone4(const HfConfig& config) {
  auto network =
      read_decoder(config, {.names = class_names("Exaone4"), .kv_heads = 32, .max_positions = 2048, .norm_eps = 1e-5});
  network.post_norms = network.qk_norm = true;
  network.sliding_window = read_sliding_window(config, 4096);
  const bool has_types = config.find("layer_types") != nullptr;
  const auto* given = config.find("sliding_window_pattern");
  TORCH_CHECK(given == nullptr || given->is_number_integer() || given->is_string(), config.path(),
              ": sliding_window_pattern must be a whole number, got ", given->dump());
  const auto pattern = has_types || network.sliding_window == 0 ? 0 : config.get<int64_t>("sliding_window_pattern", 4);
  TORCH_CHECK(has_types || pattern > 0, config.path(),
              ": without a positive sliding_window_pattern, layer_types must say which layers slide; write it");
  network.sliding_layers =
      read_sliding_layers(config, network, [pattern](int64_t layer) { return (layer + 1) % pattern != 0; });
  if (network.sliding_window == 0) return network;
  network.unrotated_layers =
      layers_where(network.num_layers, [&](int64_t layer) { return !network.is_sliding(layer); });
  return network;
}

const RegisterFamily kExaone4({.model_type = "exaone4", .architecture = "Exaone4ForCausalLM", .read = read_exaone4});

}  // namespace
}  // namespace megashard
