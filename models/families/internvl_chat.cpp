// InternVL 2.5 to 3.5 with Qwen's text models, in the form that is published with its own code.
#include "models/config/read_vision_config.h"
#include "models/families/internvl_parts.h"

namespace megashard {
namespace {

DecoderConfig read_internvl_chat(const HfConfig& root) {
  auto network = read_internvl_text(root, "llm_config");
  network.names.model = "InternVLChatModel";
  return network;
}

EncoderSpecPtr read_internvl_chat_vision(const HfConfig& root, const DecoderConfig& text) {
  const auto config = vision_config(root);
  root.require_computed(root.get<int64_t>("select_layer", -1) == -1, "select_layer must be -1, the tower's last layer");
  root.require_computed(root.get<std::string>("ps_version", "v2") == "v2", "ps_version must be v2");
  const auto side = read_positive(config, "image_size", 448);
  const auto forced = root.get_or_null("force_image_size", side);
  root.require_computed(forced == side, "force_image_size ", forced, " must be image_size ", side, " of vision_config");
  for (const char* key : {"use_backbone_lora", "use_llm_lora"})
    root.require_computed(root.get<int64_t>(key, 0) == 0, key, " must be 0; adapters are asked for by --lora-r");
  // The files do not say it: the tokens behind Qwen3's own, and behind Qwen2.5's.
  const bool is_qwen2 = root.object("llm_config")->get<std::string>("model_type", "qwen2") == "qwen2";
  return read_internvit(root, text, {"qkv_bias", "qk_normalization", "dropout", "initializer_factor"},
                        root.get<int64_t>("img_context_token_id", is_qwen2 ? 151667 : 151671),
                        {.drop_path = config.get("drop_path_rate", 0.0), .chat_files = true});
}

const RegisterFamily kInternVlChat(
    {.model_type = "internvl_chat",
     .architecture = "InternVLChatModel",
     .read = read_internvl_chat,
     .encoder = read_internvl_chat_vision,
     .weight_files = {
         .renamings = {
             {"model.vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"},
             {"model.vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"},
             {"model.vision_tower.embeddings.patch_embeddings.projection.", "vision_model.embeddings.patch_embedding."},
             {"model.vision_tower.encoder.layer.", "vision_model.encoder.layers."},
             {"model.vision_tower.", "vision_model."},
             {"model.multi_modal_projector.layer_norm.", "mlp1.0."},
             {"model.multi_modal_projector.linear_1.", "mlp1.1."},
             {"model.multi_modal_projector.linear_2.", "mlp1.3."},
             {"model.multi_modal_projector.", "mlp1."},
             {"model.language_model.", "language_model.model."},
             {"lm_head.", "language_model.lm_head."}}}});

}  // namespace
}  // namespace megashard
