// Kimi K2.5 and K2.6: MoonViT before DeepSeek-V3's layers, in the published form and in transformers'.
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/moon_vision.h"

namespace megashard {
namespace {

DecoderConfig read_kimi_k25_text(const HfConfig& root) {
  const auto config = root.object("text_config");
  TORCH_CHECK(config, root.path(), ": a Kimi K2.5 needs a text_config");
  const auto type = config->get<std::string>("model_type", "deepseek_v3");
  TORCH_CHECK(type == "kimi_k2" || type == "deepseek_v3", root.path(), ": model_type ", type,
              " of text_config is not supported; known are: kimi_k2, deepseek_v3");
  auto network = find_family("deepseek_v3")->read(*config);
  network.names.model = "Kimi_K25ForConditionalGeneration";
  network.tie_word_embeddings = root.get("tie_word_embeddings", true);
  return network;
}

VisionConfig read_moon_vit(const HfConfig& config, const DecoderConfig& text) {
  const auto size = [&](const char* published, const char* other, int64_t fallback) {
    const auto number = config.get_either<int64_t>(published, other, fallback);
    TORCH_CHECK(number > 0, config.path(), ": ", published, " ", number, " of vision_config must be positive");
    return number;
  };
  VisionConfig vision{.names = {.tower = "Kimi_K25VisionModel",
                                .patch_embed = "Kimi_K25VisionPatchEmbed",
                                .block = "Kimi_K25VisionEncoderLayer",
                                .mlp = "Kimi_K25VisionMLP",
                                .norm = "LayerNorm",
                                .merger = "Kimi_K25MultimodalProjection"},
                      .depth = size("vt_num_hidden_layers", "num_hidden_layers", 27),
                      .hidden_size = size("vt_hidden_size", "hidden_size", 1152),
                      .intermediate_size = size("vt_intermediate_size", "intermediate_size", 4304),
                      .num_heads = size("vt_num_attention_heads", "num_attention_heads", 16),
                      .patch_size = size("patch_size", "patch_size", 14),
                      .temporal_patch_size = 1,
                      .out_hidden_size = text.hidden_size,
                      .activation = read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
                      .norm_eps = 1e-5,
                      .position_side = size("init_pos_emb_height", "pos_emb_height", 64),
                      .positions = PositionTaps::kCubicCentres,
                      .images_only = true};
  const auto columns = size("init_pos_emb_width", "pos_emb_width", 64);
  TORCH_CHECK(columns == vision.position_side, config.path(), ": init_pos_emb_width ", columns,
              " of vision_config must be init_pos_emb_height ", vision.position_side);
  const auto merge = config.get<std::vector<int64_t>>("merge_kernel_size", {2, 2});
  TORCH_CHECK(merge.size() == 2 && merge[0] == merge[1] && merge[0] > 0, config.path(),
              ": merge_kernel_size of vision_config must be two equal numbers");
  vision.merge_size = merge[0];
  if (const auto* rope = config.find("rope_parameters"))
    vision.rotary_theta = config.get(*rope, "rope_theta", vision.rotary_theta);
  check_turned_heads(config, vision, "num_attention_heads");
  for (const auto& [key, only] : {std::pair("pos_emb_type", "divided_fixed"),
                                  {"merge_type", "sd2_tpool"},
                                  {"mm_projector_type", "patchmerger"},
                                  {"projector_hidden_act", "gelu"},
                                  {"video_attn_type", "spatial_temporal"}}) {
    const auto word = config.get<std::string>(key, only);
    config.require_computed(word == only, key, " ", word, " of vision_config must be ", only);
  }
  return vision;
}

EncoderSpecPtr read_kimi_k25_vision(const HfConfig& root, const DecoderConfig& text) {
  const auto config = vision_config(root);
  VisionLanguageConfig connected{
      .vision = read_moon_vit(config, text),
      .model_name = "Kimi_K25Model",
      .image_token_id = root.get_either<int64_t>("media_placeholder_token_id", "image_token_id", 163605),
      .video_token_id = -1,
      .mrope = false};
  const auto hidden =
      root.get_or_null("projection_hidden_size", config.get("mm_hidden_size", connected.vision.hidden_size));
  TORCH_CHECK(hidden == connected.vision.hidden_size, root.path(), ": projection_hidden_size ", hidden,
              " must be the tower's hidden size ", connected.vision.hidden_size);
  return moon_vision(std::move(connected), root.get("projection_layer_norm_eps", config.get("projector_ln_eps", 1e-5)));
}

const RegisterFamily kKimiK25({.model_type = "kimi_k25",
                               .architecture = "Kimi_K25ForConditionalGeneration",
                               .read = read_kimi_k25_text,
                               .encoder = read_kimi_k25_vision,
                               .weight_files = {.renamings = {{"model.vision_tower.", "vision_tower."},
                                                              {"model.mm_projector.", "mm_projector."},
                                                              {"model.language_model.", "language_model.model."},
                                                              {"lm_head.", "language_model.lm_head."}}}});

}  // namespace
}  // namespace megashard
