// InternVL 2.5 to 3.5 with Qwen's text models, in transformers' form.
#include "models/config/read_vision_config.h"
#include "models/families/internvl_parts.h"

namespace megashard {
namespace {

DecoderConfig read_internvl(const HfConfig& root) {
  auto network = read_internvl_text(root, "text_config");
  network.names.model = "InternVLForConditionalGeneration";
  network.tie_word_embeddings = root.get("tie_word_embeddings", true);
  return network;
}

EncoderSpecPtr read_internvl_vision(const HfConfig& root, const DecoderConfig& text) {
  const auto config = vision_config(root);
  root.require_computed(root.get<int64_t>("vision_feature_layer", -1) == -1,
                        "vision_feature_layer must be -1, the tower's last layer");
  root.require_computed(root.get<std::string>("vision_feature_select_strategy", "default") == "default",
                        "vision_feature_select_strategy must be default, which leaves the class token out");
  for (const char* key : {"attention_dropout", "projection_dropout"})
    config.require_computed(config.get(key, 0.0) == 0, key, " of vision_config must be 0");
  for (const auto& [key, only] :
       {std::pair("use_mask_token", false), {"use_absolute_position_embeddings", true}, {"use_mean_pooling", true}}) {
    config.require_computed(config.get(key, only) == only, key, " of vision_config must be ", only ? "true" : "false");
  }
  return read_internvit(root, text, {"attention_bias", "use_qk_norm", "hidden_dropout_prob", "layer_scale_init_value"},
                        root.get<int64_t>("image_token_id", 151667),
                        {.projector_activation = read_activation(root, "projector_hidden_act", "gelu")});
}

const RegisterFamily kInternVl({.model_type = "internvl",
                                .architecture = "InternVLForConditionalGeneration",
                                .read = read_internvl,
                                .encoder = read_internvl_vision,
                                .weight_files = {
                                    .renamings = {{"model.vision_tower.", "vision_tower."},
                                                  {"model.multi_modal_projector.", "multi_modal_projector."},
                                                  {"model.language_model.", "language_model.model."},
                                                  {"lm_head.", "language_model.lm_head."}}}});

}  // namespace
}  // namespace megashard
