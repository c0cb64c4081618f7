#include "models/families/model_family.h"
#include "models/families/qwen3_hybrid.h"

namespace megashard {
namespace {

DecoderConfig read_qwen3_next(const HfConfig& config) {
  auto network = read_hybrid(config, {.names = class_names("Qwen3Next"), .kv_heads = 2});
  network.moe = read_gated_experts(config, {.num_experts = 512, .experts_per_token = 10, .intermediate_size = 512});
  network.moe.router.normalise_weights = config.get("norm_topk_prob", true);
  return network;
}

LayerSpec qwen3_next_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  return hybrid_layer(config, network, index, /*packed=*/true);
}

const RegisterFamily kQwen3Next({.model_type = "qwen3_next",
                                 .architecture = "Qwen3NextForCausalLM",
                                 .read = read_qwen3_next,
                                 .layer = qwen3_next_layer,
                                 .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kMtp}});

}  // namespace
}  // namespace megashard
