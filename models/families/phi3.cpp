#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Phi-3, 3.5 and 4: fused projections, and for long texts positions with divisors for each pair of channels.
DecoderConfig read_phi3(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Phi3"),
                                       .max_positions = 4096,
                                       .norm_eps = 1e-5,
                                       .rotates_partially = true,
                                       .pad_token_id = 32000});
  network.sliding_window = read_sliding_window(config, 0);
  slide_all_or_no_layers(config, network);
  using Kind = RotaryConfig::Kind;
  const bool is_long = network.rotary.kind == Kind::kLongrope;
  config.require_computed(is_long || network.rotary.kind == Kind::kDefault,
                          "rope_type must be default or longrope in this family, in rope_parameters or rope_scaling");
  const auto original = config.get<int64_t>("original_max_position_embeddings", 4096);
  config.require_computed(!is_long || network.rotary.original_max_positions == static_cast<double>(original),
                          "original_max_position_embeddings is ", original, ", and for rope_type longrope ",
                          network.rotary.original_max_positions,
                          " of rope_parameters: write the right one at the top of the file, too");
  return network;
}

/// Drops outputs of branches, but no embeddings.
LayerSpec phi3_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  layer.dropout = config.get("resid_pdrop", 0.0);
  return layer;
}

const RegisterFamily kPhi3({.model_type = "phi3",
                            .architecture = "Phi3ForCausalLM",
                            .read = read_phi3,
                            .layer = phi3_layer,
                            .weight_files = {.fused = {.qkv = "qkv_proj", .gate_up = "gate_up_proj"}}});

}  // namespace
}  // namespace megashard
