#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// GLM-4.5 and 4.6.
DecoderConfig read_glm4_moe(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Glm4Moe"),
                                       .kv_heads = 8,
                                       .max_positions = 131072,
                                       .norm_eps = 1e-5,
                                       .rotary = {.fraction = 0.5},
                                       .rotates_partially = true});
  network.qkv_bias = config.get("attention_bias", false);
  require_no_windows(config, network);
  // transformers' other name of num_nextn_predict_layers, which it refuses to read as null.
  static_cast<void>(config.get<int64_t>("num_mtp_layers", 0));
  network.qk_norm = config.get("use_qk_norm", false);
  network.moe = read_grouped_moe(config, {.num_experts = 128, .experts_per_token = 8, .intermediate_size = 1408},
                                 network.num_layers);
  network.names.moe = "Glm4MoeMoE";
  network.names.router = "Glm4MoeTopkRouter";
  return network;
}

const RegisterFamily kGlm4Moe({.model_type = "glm4_moe",
                               .architecture = "Glm4MoeForCausalLM",
                               .read = read_glm4_moe,
                               .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kBehindLast}});

}  // namespace
}  // namespace megashard
