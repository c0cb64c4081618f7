// GLM-4.5V: GLM-4.5's text model with M-RoPE behind a tower of its own.
#include <utility>

#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/glm_vision.h"

namespace megashard {
namespace {

DecoderConfig read_glm4v_moe_text(const HfConfig& root) {
  const auto config = text_config(root);
  auto network = read_text(root, {.names = class_names("Glm4vMoeText"),
                                  .kv_heads = 8,
                                  .num_layers = 46,
                                  .num_heads = 96,
                                  .vocab_size = 151424,
                                  .max_positions = 65536,
                                  .intermediate_size = 10944,
                                  .norm_eps = 1e-5,
                                  .rotary = {.fraction = 0.5, .mrope_section = {8, 12, 12}},
                                  .rotates_partially = true});
  network.names.model = "Glm4vMoeForConditionalGeneration";
  network.names.moe = "Glm4vMoeTextMoE";
  network.names.router = "Glm4vMoeTextTopkRouter";
  network.qkv_bias = config.get("attention_bias", true);
  config.require_computed(!config.get("use_qk_norm", false), "use_qk_norm of text_config must be false");
  config.require_computed(!config.get("output_router_logits", false),
                          "output_router_logits of text_config must be false; for a loss of balance give "
                          "--moe-aux-loss-coeff");
  require_no_windows(config, network);
  network.moe = read_grouped_moe(config, {.num_experts = 128, .experts_per_token = 8, .intermediate_size = 1408},
                                 network.num_layers);
  network.tie_word_embeddings = root.get("tie_word_embeddings", false) || config.get("tie_word_embeddings", false);
  return network;
}

EncoderSpecPtr read_glm4v_moe_vision(const HfConfig& root, const DecoderConfig& text) {
  const auto config = vision_config(root);
  VisionConfig vision{.kind = VisionKind::kGlm4,
                      .names = {.tower = "Glm4vMoeVisionModel",
                                .patch_embed = "Glm4vMoeVisionPatchEmbed",
                                .block = "Glm4vMoeVisionBlock",
                                .attention = "Glm4vMoeVisionAttention",
                                .mlp = "Glm4vMoeisionMlp",
                                .norm = "Glm4vMoeRMSNorm"},
                      .depth = 24,
                      .hidden_size = 1536,
                      .intermediate_size = 13696,
                      .num_heads = 12,
                      .patch_size = 14,
                      .out_hidden_size = 4096,
                      .norm_eps = config.get("rms_norm_eps", 1e-5),
                      .qkv_bias = config.get("attention_bias", false),
                      .block_bias = false,
                      .positions = PositionTaps::kCubicCentres};
  read_tower(config, vision, "silu");
  config.require_computed(config.get("attention_dropout", 0.0) == 0, "attention_dropout of vision_config must be 0");
  const auto merger_width = std::exchange(vision.intermediate_size, vision.out_hidden_size);
  vision.position_side = read_positive(config, "image_size", 336) / vision.patch_size;
  TORCH_CHECK(vision.position_side > 0, config.path(), ": image_size of vision_config is less than a patch");
  auto connected = connect_vision(root, std::move(vision), text, "Glm4vMoeModel", /*image_token_id=*/151363);
  connected.video_token_id = -1;  // the frames of a video are images, between its marks
  return glm_vision(std::move(connected), merger_width);
}

const RegisterFamily kGlm4vMoe({.model_type = "glm4v_moe",
                                .architecture = "Glm4vMoeForConditionalGeneration",
                                .read = read_glm4v_moe_text,
                                .encoder = read_glm4v_moe_vision});

}  // namespace
}  // namespace megashard
