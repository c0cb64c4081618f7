// Mistral Small 3.1 and 3.2, Magistral, Devstral 2 and Ministral 3 with pictures: Pixtral's tower before a text model.
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/pixtral_vision.h"

namespace megashard {
namespace {

/// The family of text_config, which has to be one that files of this kind have.
const ModelFamily& text_family(const HfConfig& root) {
  const auto text = root.object("text_config");
  const auto type = text ? text->get<std::string>("model_type", "mistral") : "mistral";
  TORCH_CHECK(type == "mistral" || type == "ministral3", root.path(), ": model_type ", type,
              " of text_config is not supported; known are: mistral, ministral3");
  return *find_family(type);
}

DecoderConfig read_mistral3_text(const HfConfig& root) {
  auto network = text_family(root).read(text_config(root));
  network.names.model = "Mistral3ForConditionalGeneration";
  network.tie_word_embeddings = root.get("tie_word_embeddings", network.tie_word_embeddings);
  return network;
}

VisionConfig read_pixtral(const HfConfig& config, const HfConfig& root, const DecoderConfig& text) {
  config.require_computed(config.get<std::string>("model_type", "pixtral") == "pixtral",
                          "the model_type of vision_config must be pixtral");
  auto vision = read_image_tower(config, {.names = {.tower = "PixtralVisionModel",
                                                    .block = "PixtralAttentionLayer",
                                                    .attention = "PixtralAttention",
                                                    .mlp = "PixtralMLP",
                                                    .norm = "PixtralRMSNorm"},
                                          .depth = 24,
                                          .hidden_size = 1024,
                                          .intermediate_size = 4096,
                                          .num_heads = 16,
                                          .merge_size = read_positive(root, "spatial_merge_size", 2),
                                          .out_hidden_size = text.hidden_size,
                                          .activation = read_activation(config, "hidden_act", "gelu"),
                                          .norm_eps = 1e-5});
  vision.rotary_theta = config.get("rope_theta", 10000.0);
  if (const auto* rope = config.find("rope_parameters")) {
    config.require_computed(config.get<std::string>(*rope, "rope_type", "axial") == "axial",
                            "the rope_type of vision_config must be axial");
    vision.rotary_theta = config.get(*rope, "rope_theta", vision.rotary_theta);
  }
  check_turned_heads(config, vision, "num_attention_heads");
  return vision;
}

EncoderSpecPtr read_mistral3_vision(const HfConfig& root, const DecoderConfig& text) {
  root.require_computed(root.get<int64_t>("vision_feature_layer", -1) == -1,
                        "vision_feature_layer must be -1, the tower's last layer");
  VisionLanguageConfig config{.vision = read_pixtral(vision_config(root), root, text),
                              .model_name = "Mistral3Model",
                              .image_token_id = root.get<int64_t>("image_token_index", 10),
                              .video_token_id = -1,
                              .mrope = false,
                              .rows_apart = true};
  ProjectorSpec projector{
      .class_name = "Mistral3MultiModalProjector",
      .norm = {.class_name = "Mistral3RMSNorm", .width = config.vision.hidden_size, .eps = text.norm_eps},
      .activation = read_activation(root, "projector_hidden_act", "gelu"),
      .bias = root.get("multimodal_projector_bias", false)};
  return pixtral_vision(std::move(config), std::move(projector));
}

const RegisterFamily kMistral3({.model_type = "mistral3",
                                .architecture = "Mistral3ForConditionalGeneration",
                                .read = read_mistral3_text,
                                .encoder = read_mistral3_vision,
                                .weight_files = {
                                    .renamings = {{"model.vision_tower.", "vision_tower."},
                                                  {"model.multi_modal_projector.", "multi_modal_projector."},
                                                  {"model.language_model.", "language_model.model."},
                                                  {"lm_head.", "language_model.lm_head."}}}});

}  // namespace
}  // namespace megashard
