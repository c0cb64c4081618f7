#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Mistral whose queries grow with their position.
DecoderConfig read_ministral3(const HfConfig& file) {
  const auto config = with_yarn(file, {.theta = 1e6, .factor = 16, .original_max_positions = 16384});
  auto network = read_decoder(config, {.names = class_names("Ministral3"),
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .max_positions = 262144,
                                       .norm_eps = 1e-5,
                                       .pad_token_id = 11});
  network.sliding_window = read_sliding_window(config, 0);
  slide_all_or_no_layers(config, network);
  network.temperature = read_query_temperature(config);
  return network;
}

const RegisterFamily kMinistral3({.model_type = "ministral3",
                                  .architecture = "Ministral3ForCausalLM",
                                  .read = read_ministral3});

}  // namespace
}  // namespace megashard
