#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// rotary_dim channels of a head turn in the published files; transformers 5 writes partial_rotary_factor.
double published_part(const HfConfig& config) {
  const auto channels = config.get<int64_t>("rotary_dim", 0);
  return channels == 0 ? 1.0
                       : static_cast<double>(channels) / static_cast<double>(config.get<int64_t>("head_dim", 128));
}

DecoderConfig read_minimax_m2(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("MiniMaxM2"),
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .max_positions = 196608,
                                       .rotary = {.theta = 5e6, .fraction = published_part(config)},
                                       .rotates_partially = true});
  network.qk_norm_of_all_heads = true;
  require_no_windows(config, network);
  network.moe = read_moe(
      config,
      {.num_experts = 256, .experts_per_token = 8, .intermediate_key = "intermediate_size", .intermediate_size = 1536});
  network.moe.router = {.score = RouterConfig::Score::kSigmoid, .corrects_choice = true, .normalise_weights = true};
  return network;
}

const RegisterFamily kMiniMaxM2({.model_type = "minimax_m2",
                                 .architecture = "MiniMaxM2ForCausalLM",
                                 .read = read_minimax_m2,
                                 .weight_files = {.renamings = {{"mlp.gate.e_score_correction_bias",
                                                                 "block_sparse_moe.e_score_correction_bias"},
                                                                {"mlp.gate.", "block_sparse_moe.gate."},
                                                                {"mlp.experts.", "block_sparse_moe.experts."}},
                                                  .experts = {.gate = "w1", .up = "w3", .down = "w2"}}});

}  // namespace
}  // namespace megashard
