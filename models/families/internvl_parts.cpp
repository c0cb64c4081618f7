#include "models/families/internvl_parts.h"

#include <cmath>

#include "models/config/read_vision_config.h"

namespace megashard {

DecoderConfig read_internvl_text(const HfConfig& root, const char* part) {
  const auto text = root.object(part);
  TORCH_CHECK(text, root.path(), ": an InternVL model needs a ", part);
  const auto type = text->get<std::string>("model_type", "qwen2");
  TORCH_CHECK(type == "qwen2" || type == "qwen3" || type == "qwen3_moe", root.path(), ": model_type ", type, " of ",
              part, " is not supported; known are: qwen2, qwen3, qwen3_moe");
  auto network = find_family(type)->read(*text);
  network.moe.aux_loss_coef = 0;  // as both classes, which ask for logits alone
  return network;
}

namespace {

/// A side of squares: a number, or two equal ones.
int64_t read_side(const HfConfig& config, const char* key, int64_t fallback) {
  const auto* value = config.find(key);
  if (value == nullptr || !value->is_array()) return read_positive(config, key, fallback);
  const auto sides = config.get<std::vector<int64_t>>(key, {});
  TORCH_CHECK(sides.size() == 2 && sides[0] == sides[1] && sides[0] > 0, config.path(), ": ", key, " ", value->dump(),
              " of vision_config must be two equal numbers");
  return sides[0];
}

}  // namespace

EncoderSpecPtr read_internvit(const HfConfig& root, const DecoderConfig& text, const InternVitKeys& keys,
                              int64_t image_token, InternVitSpec spec) {
  const auto config = vision_config(root);
  const auto norm = config.get<std::string>("norm_type", "layer_norm");
  config.require_computed(norm == "layer_norm" || norm == "rms_norm", "norm_type ", norm,
                          " of vision_config must be layer_norm or rms_norm");
  config.require_computed(config.get(keys.dropout, 0.0) == 0, keys.dropout, " of vision_config must be 0");
  spec.norm = norm == "rms_norm" ? NormKind::kRmsNorm : NormKind::kLayerNorm;
  spec.qkv_bias = config.get(keys.bias, false);
  spec.qk_norm = config.get(keys.qk_norm, false);
  spec.first_scale = config.get(keys.first_scale, 0.1);
  const auto patch = read_side(config, "patch_size", 14);
  auto vision = read_image_tower(config, {.names = {.tower = "InternVLVisionModel",
                                                    .patch_embed = "InternVLVisionPatchEmbeddings",
                                                    .block = "InternVLVisionLayer",
                                                    .attention = "InternVLVisionAttention",
                                                    .mlp = "InternVLVisionMLP"},
                                          .depth = 24,
                                          .hidden_size = 1024,
                                          .intermediate_size = 4096,
                                          .num_heads = 16,
                                          .patch_size = patch,
                                          .out_hidden_size = text.hidden_size,
                                          .activation = read_activation(config, "hidden_act", "gelu"),
                                          .norm_eps = config.get("layer_norm_eps", 1e-6)});
  vision.fixed_side = read_side(config, "image_size", 448) / patch;
  const double ratio = root.get("downsample_ratio", 0.5);
  vision.merge_size = ratio > 0 ? static_cast<int64_t>(std::lround(1 / ratio)) : 0;
  TORCH_CHECK(vision.merge_size > 0 && static_cast<double>(vision.merge_size) * ratio == 1 &&
                  vision.fixed_side >= vision.merge_size && vision.fixed_side % vision.merge_size == 0,
              root.path(), ": 1 / downsample_ratio ", ratio, " must be a whole number that divides the ",
              vision.fixed_side, " patches of a side");
  TORCH_CHECK(vision.hidden_size % vision.num_heads == 0, root.path(), ": hidden_size ", vision.hidden_size,
              " of vision_config must be a multiple of num_attention_heads ", vision.num_heads);
  return internvit_vision({.vision = std::move(vision),
                           .model_name = "InternVLModel",
                           .image_token_id = image_token,
                           .video_token_id = -1,
                           .mrope = false},
                          spec);
}

}  // namespace megashard
