// Step3-VL-10B: a ViT over tiles before Qwen3.
#include <cmath>

#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/step_vision.h"

namespace megashard {
namespace {

DecoderConfig read_step_text(const HfConfig& root) {
  const auto text = root.object("text_config");
  TORCH_CHECK(text, root.path(), ": a Step3-VL needs a text_config");
  const auto type = text->get<std::string>("model_type", "qwen3");
  TORCH_CHECK(type == "qwen3", root.path(), ": model_type ", type, " of text_config is not supported; known is: qwen3");
  auto network = find_family("qwen3")->read(*text);
  network.names.model = "Step3VL10BForCausalLM";
  network.tie_word_embeddings = root.get("tie_word_embeddings", network.tie_word_embeddings);
  return network;
}

EncoderSpecPtr read_step_vision(const HfConfig& root, const DecoderConfig& text) {
  const auto config = vision_config(root);
  for (const auto& [key, only] : {std::pair("use_cls_token", false),
                                  {"ues_cls_token", false},
                                  {"use_ln_pre", true},
                                  {"use_ln_post", false},
                                  {"use_abs_posemb", true},
                                  {"use_rope2d", true}}) {
    config.require_computed(config.get(key, only) == only, key, " of vision_config must be ", only ? "true" : "false");
  }
  root.require_computed(root.get<int64_t>("understand_projector_stride", 2) == 2,
                        "understand_projector_stride must be 2");
  VisionConfig vision{
      .names = {.tower = "StepRoboticsVisionEncoder", .block = "EncoderVisionBlock", .mlp = "EncoderMLP"},
      .depth = read_positive(config, "layers", 47),
      .hidden_size = read_positive(config, "width", 1536),
      .num_heads = read_positive(config, "heads", 16),
      .in_channels = read_positive(config, "num_channels", 3),
      .patch_size = read_positive(config, "patch_size", 14),
      .temporal_patch_size = 1,
      .merge_size = 4,  // of both convolutions
      .out_hidden_size = text.hidden_size,
      .rotary_theta = config.get("rope_theta", 10000.0),
      .activation = read_activation(config, "hidden_act", "quick_gelu"),
      .norm_eps = config.get("layer_norm_eps", 1e-5),
      .positions = PositionTaps::kLinearCentres,
      .square_images = true};
  const double ratio = config.get("mlp_ratio", 8960.0 / 1536);
  vision.intermediate_size = static_cast<int64_t>(static_cast<double>(vision.hidden_size) * ratio);
  vision.position_side = read_positive(config, "image_size", 728) / vision.patch_size;
  TORCH_CHECK(vision.intermediate_size > 0 && vision.position_side > 0, config.path(),
              ": mlp_ratio and image_size of vision_config must be positive");
  check_turned_heads(config, vision, "heads");
  return step_vision(
      {.vision = std::move(vision),
       .model_name = "StepRoboticsModel",
       .image_token_id = root.get<int64_t>("image_token_id", 151679),
       .video_token_id = -1,
       .mrope = false},
      {.first_scale = config.get("ls_init_value", 0.1), .projector_bias = root.get("projector_bias", false)});
}

const RegisterFamily kStepRobotics({.model_type = "step_robotics",
                                    .architecture = "Step3VL10BForCausalLM",
                                    .read = read_step_text,
                                    .encoder = read_step_vision,
                                    .weight_files = {
                                        .renamings = {{"model.vision_model.", "vision_model."},
                                                      {"model.vit_large_projector.", "vit_large_projector."},
                                                      {"model.language_model.", "model."}}}});

}  // namespace
}  // namespace megashard
