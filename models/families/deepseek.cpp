// DeepSeek-V3, R1, Moonlight and Kimi K2 (deepseek_v3), and DeepSeek-V2.
#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_common(const HfConfig& config, const char* prefix, int64_t max_positions) {
  auto network = read_decoder(config, {.names = class_names(prefix),
                                       .head_dim = 64,
                                       .max_positions = max_positions,
                                       .head_dim_key = "qk_rope_head_dim"});
  const auto head_dim = config.get_or_null("head_dim", network.head_dim);
  config.require_computed(head_dim == network.head_dim, "head_dim ", head_dim, " must be qk_rope_head_dim ",
                          network.head_dim, "; take it out");
  require_no_windows(config, network);
  read_latent(config, network, {.query_rank = 1536, .key_rank = 512, .plain_dim = 128, .value_dim = 128});
  return network;
}

DecoderConfig read_deepseek_v3(const HfConfig& config) {
  auto network = read_common(config, "DeepseekV3", 4096);
  // transformers' other name of num_nextn_predict_layers, which it refuses to read as null.
  static_cast<void>(config.get<int64_t>("num_mtp_layers", 0));
  network.rotary.interleaved = config.get("rope_interleave", true);
  network.moe = read_grouped_moe(config,
                                 {.num_experts = 256,
                                  .experts_per_token = 8,
                                  .intermediate_size = 2048,
                                  .dense_layers = 3,
                                  .groups = 8,
                                  .chosen_groups = 4,
                                  .scale = 2.5},
                                 network.num_layers);
  network.names.moe = "DeepseekV3MoE";
  network.names.experts = "DeepseekV3Experts";
  network.names.router = "DeepseekV3TopkRouter";
  return network;
}

DecoderConfig read_deepseek_v2(const HfConfig& config) {
  auto network = read_common(config, "DeepseekV2", 2048);
  network.rotary.interleaved = true;
  network.mlp_bias = config.get("mlp_bias", false);
  network.moe = read_grouped_moe(config,
                                 {.num_experts = 64,
                                  .experts_per_token = 0,  // must be given
                                  .intermediate_size = 1407,
                                  .shared_experts = 2,
                                  .dense_layers = 0},
                                 network.num_layers);
  const auto method = config.get<std::string>("topk_method", "greedy");
  config.require_computed(method == "greedy" || method == "group_limited_greedy", "topk_method ", method,
                          " is not supported; known are greedy and group_limited_greedy");
  auto& router = network.moe.router;
  router = {.in_fp32 = true,
            .scale = router.scale,
            .groups = method == "greedy" ? 1 : router.groups,
            .chosen_groups = method == "greedy" ? 1 : router.chosen_groups,
            .best_of_group = 1,
            .others_score_zero = true};
  network.names.moe = "DeepseekV2Moe";
  network.names.router = "DeepseekV2TopkRouter";
  return network;
}

const RegisterFamily kDeepseekV3({.model_type = "deepseek_v3",
                                  .architecture = "DeepseekV3ForCausalLM",
                                  .read = read_deepseek_v3,
                                  .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kBehindLast}});

const RegisterFamily kDeepseekV2({.model_type = "deepseek_v2",
                                  .architecture = "DeepseekV2ForCausalLM",
                                  .read = read_deepseek_v2});

}  // namespace
}  // namespace megashard
