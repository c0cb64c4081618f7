#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// DeepSeek-V3's experts by softmax scores, without a correction.
MoeConfig read_softmax_experts(const HfConfig& config, int64_t num_layers) {
  const auto experts = config.get_either<int64_t>("n_routed_experts", "num_local_experts", 128);
  auto moe = read_grouped_moe(
      config, {.num_experts = experts, .experts_per_token = 4, .intermediate_size = 2048, .dense_layers = 0},
      num_layers);
  moe.router.score = RouterConfig::Score::kSoftmax;
  moe.router.in_fp32 = moe.router.corrects_choice = false;
  moe.router.others_score_zero = true;
  return moe;
}

/// Mistral Small 4: DeepSeek's layers, whose queries grow with their position.
DecoderConfig read_mistral4(const HfConfig& file) {
  const auto config = with_yarn(file, {.theta = 1e4, .factor = 128, .original_max_positions = 8192});
  const auto rotated = config.get<int64_t>("qk_rope_head_dim", 64);
  const auto head_dim = config.get<int64_t>("qk_nope_head_dim", 64) + rotated;
  TORCH_CHECK(rotated > 0 && head_dim > rotated, config.path(),
              ": qk_nope_head_dim and qk_rope_head_dim must be positive");
  auto network =
      read_decoder(config, {.names = class_names("Mistral4"),
                            .head_dim = head_dim,
                            .max_positions = 1048576,
                            .rotary = {.fraction = static_cast<double>(rotated) / static_cast<double>(head_dim)},
                            .rotates_partially = true,
                            .pad_token_id = 11});
  TORCH_CHECK(network.head_dim == head_dim, config.path(), ": head_dim ", network.head_dim,
              " must be qk_nope_head_dim and qk_rope_head_dim together, ", head_dim, "; take it out");
  auto& rotary = network.rotary;
  config.require_computed(rotary.kind == RotaryConfig::Kind::kYarn,
                          "rope_type must be yarn in this family, in rope_parameters or rope_scaling");
  const auto turned = static_cast<int64_t>(static_cast<double>(head_dim) * rotary.fraction);
  config.require_computed(turned == rotated, "partial_rotary_factor ", rotary.fraction, " turns ", turned,
                          " channels of a head, and qk_rope_head_dim is ", rotated,
                          ": take partial_rotary_factor out of rope_parameters");
  network.head_dim = rotated;  // that of the positions
  rotary.fraction = 1;
  rotary.interleaved = config.get("rope_interleave", true);
  network.temperature = read_query_temperature(config);
  require_no_windows(config, network);
  read_latent(config, network, {.query_rank = 1024, .key_rank = 256, .plain_dim = 64, .value_dim = 128});
  network.moe = read_softmax_experts(config, network.num_layers);
  network.names.moe = "Mistral4MoE";
  network.names.router = "Mistral4TopkRouter";
  return network;
}

const RegisterFamily kMistral4({.model_type = "mistral4",
                                .architecture = "Mistral4ForCausalLM",
                                .read = read_mistral4,
                                .weight_files = {.experts = {.form = ExpertFiles::Form::kPacked}}});

}  // namespace
}  // namespace megashard
