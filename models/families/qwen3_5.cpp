// Qwen3.5 and 3.6, dense and with experts: the text models alone, and with Qwen3-VL's tower without deepstack.
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/families/qwen3_hybrid.h"
#include "models/vision/qwen_vision.h"

namespace megashard {
namespace {

DecoderConfig read_qwen3_5(const HfConfig& config) {
  auto network = read_hybrid(config, {.names = class_names("Qwen3_5"),
                                      .kv_heads = 4,
                                      .rotary = {.mrope_section = {11, 11, 10}, .mrope_interleaved = true}});
  network.names.decoder = "Qwen3_5TextModel";
  return network;
}

DecoderConfig read_qwen3_5_moe(const HfConfig& config) {
  auto network = read_hybrid(config, {.names = class_names("Qwen3_5Moe"),
                                      .kv_heads = 2,
                                      .intermediate_size = 0,
                                      .rotary = {.mrope_section = {11, 11, 10}, .mrope_interleaved = true}});
  network.names.decoder = "Qwen3_5MoeTextModel";
  network.moe = read_gated_experts(config, {.num_experts = 256, .experts_per_token = 8, .intermediate_size = 512});
  network.moe.router.normalise_weights = true;
  return network;
}

LayerSpec qwen3_5_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  return hybrid_layer(config, network, index, /*packed=*/false);
}

/// The text model in a vision-language model.
DecoderConfig within(const HfConfig& root, DecoderConfig network, const char* model) {
  network.names.model = model;
  network.tie_word_embeddings = root.get("tie_word_embeddings", false);
  return network;
}

DecoderConfig read_text_of_vl(const HfConfig& root) {
  return within(root, read_qwen3_5(text_config(root)), "Qwen3_5ForConditionalGeneration");
}

DecoderConfig read_text_of_vl_moe(const HfConfig& root) {
  return within(root, read_qwen3_5_moe(text_config(root)), "Qwen3_5MoeForConditionalGeneration");
}

LayerSpec layer_of_vl(const HfConfig& root, const DecoderConfig& network, int64_t index) {
  return qwen3_5_layer(text_config(root), network, index);
}

EncoderSpecPtr encoder_of(const HfConfig& root, const DecoderConfig& text, const std::string& prefix) {
  auto vision = read_qwen3_tower(vision_config(root), prefix + "Vision");
  return qwen_vision(connect_vision(root, std::move(vision), text, (prefix + "Model").c_str(), 248056));
}

EncoderSpecPtr read_vl(const HfConfig& root, const DecoderConfig& text) { return encoder_of(root, text, "Qwen3_5"); }

EncoderSpecPtr read_vl_moe(const HfConfig& root, const DecoderConfig& text) {
  return encoder_of(root, text, "Qwen3_5Moe");
}

const RegisterFamily kQwen35Text({.model_type = "qwen3_5_text",
                                  .architecture = "Qwen3_5ForCausalLM",
                                  .read = read_qwen3_5,
                                  .layer = qwen3_5_layer,
                                  .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kMtp}});

const RegisterFamily kQwen35MoeText({.model_type = "qwen3_5_moe_text",
                                     .architecture = "Qwen3_5MoeForCausalLM",
                                     .read = read_qwen3_5_moe,
                                     .layer = qwen3_5_layer,
                                     .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kMtp}});

const RegisterFamily kQwen35({.model_type = "qwen3_5",
                              .architecture = "Qwen3_5ForConditionalGeneration",
                              .read = read_text_of_vl,
                              .encoder = read_vl,
                              .layer = layer_of_vl,
                              .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kMtp}});

const RegisterFamily kQwen35Moe({.model_type = "qwen3_5_moe",
                                 .architecture = "Qwen3_5MoeForConditionalGeneration",
                                 .read = read_text_of_vl_moe,
                                 .encoder = read_vl_moe,
                                 .layer = layer_of_vl,
                                 .weight_files = {.prediction_layers = WeightFiles::PredictionLayers::kMtp}});

}  // namespace
}  // namespace megashard
