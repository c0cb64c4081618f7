#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_mixtral(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Mixtral"),
                                       .kv_heads = 8,
                                       .max_positions = 131072,
                                       .norm_eps = 1e-5,
                                       .rotary = {.theta = 1e6}});
  network.sliding_window = read_sliding_window(config, 0);
  slide_all_or_no_layers(config, network);
  network.moe = read_moe(
      config,
      {.num_experts = 8, .experts_per_token = 2, .intermediate_key = "intermediate_size", .intermediate_size = 14336});
  network.moe.router.normalise_weights = true;
  return network;
}

const RegisterFamily kMixtral({.model_type = "mixtral",
                               .architecture = "MixtralForCausalLM",
                               .read = read_mixtral,
                               .weight_files = {.renamings = {{"mlp.gate.", "block_sparse_moe.gate."},
                                                              {"mlp.experts.", "block_sparse_moe.experts."}},
                                                .experts = {.gate = "w1", .up = "w3", .down = "w2"}}});

}  // namespace
}  // namespace megashard
