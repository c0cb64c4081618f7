#include <tuple>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Norms behind attention and MLP, and of the queries and keys of all heads.
DecoderConfig read_olmo(const HfConfig& config, const char* prefix, bool rotates_by_layer) {
  auto network = read_decoder(config, {.names = class_names(prefix),
                                       .max_positions = 2048,
                                       .norm_eps = 1e-5,
                                       .rotates_by_layer = rotates_by_layer,
                                       .pad_token_id = 1});
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.post_norms = network.qk_norm_of_all_heads = true;
  return network;
}

DecoderConfig read_olmo2(const HfConfig& config) {
  auto network = read_olmo(config, "Olmo2", /*rotates_by_layer=*/false);
  require_no_windows(config, network);
  return network;
}

DecoderConfig read_olmo3(const HfConfig& config) {
  auto network = read_olmo(config, "Olmo3", /*rotates_by_layer=*/true);
  std::tie(network.rotary, network.sliding_rotary) =
      read_rotary_by_layer(config, /*full_theta=*/5e5, /*sliding_key=*/"", /*sliding_theta=*/5e5, network);
  network.sliding_window = read_sliding_window(config, 4096);
  network.sliding_layers = read_sliding_layers(config, network, [](int64_t layer) { return (layer + 1) % 4 != 0; });
  return network;
}

const RegisterFamily kOlmo2({.model_type = "olmo2", .architecture = "Olmo2ForCausalLM", .read = read_olmo2});
const RegisterFamily kOlmo3({.model_type = "olmo3", .architecture = "Olmo3ForCausalLM", .read = read_olmo3});

}  // namespace
}  // namespace megashard
