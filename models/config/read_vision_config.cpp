#include "models/config/read_vision_config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "models/config/read_rotary.h"

namespace megashard {

HfConfig text_config(const HfConfig& root) {
  const auto text = root.object("text_config");
  if (!text) return root;
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
                          "attention_bias", "use_sliding_window", "max_window_layers", "rope_theta", "num_experts",
                          "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}) {
    const auto *above = root.find(key), *own = text->find(key);
    TORCH_CHECK(above == nullptr || own == nullptr || *above == *own, root.path(), ": ", key, " says ", above->dump(),
                " and text_config.", key, " says ", own->dump(), ": keep the one that is right, in text_config");
  }
  return *text;
}

HfConfig vision_config(const HfConfig& root) {
  const auto vision = root.object("vision_config");
  TORCH_CHECK(vision, root.path(), ": a vision-language model needs a vision_config");
  return *vision;
}

DecoderConfig read_text(const HfConfig& root, const DecoderDefaults& defaults) {
  auto network = read_decoder(text_config(root), defaults);
  const bool has_positions = root.find("rope_scaling") != nullptr || root.find("rope_parameters") != nullptr;
  if (!has_positions || !root.object("text_config")) return network;
  auto above = read_rotary(root, defaults.rotary, network);
  above.theta = network.rotary.theta;  // already compared
  TORCH_CHECK(above == network.rotary, root.path(),
              ": rope_scaling (or rope_parameters) describes other positions than "
              "text_config does, which is what transformers reads: put what is meant into text_config and take the "
              "other out");
  return network;
}

std::vector<int64_t> read_blocks(const HfConfig& config, const char* key, std::vector<int64_t> fallback,
                                 int64_t depth) {
  const auto* list = config.find(key);
  if (list == nullptr) return fallback;
  bool fits = list->is_array();
  std::vector<int64_t> numbers;
  for (const auto& each : *list) {
    fits = fits && each.is_number_integer();
    if (fits) numbers.push_back(each.get<int64_t>());
    fits = fits && numbers.back() >= 0 && numbers.back() < depth;
  }
  TORCH_CHECK(fits, config.path(), ": ", key, " must list blocks of the vision tower's ", depth, ", got ",
              list->dump());
  return numbers;
}

void check_turned_heads(const HfConfig& config, const VisionConfig& vision, const char* key) {
  TORCH_CHECK(vision.depth > 0 && vision.num_heads > 0 && vision.hidden_size % (4 * vision.num_heads) == 0,
              config.path(), ": hidden_size ", vision.hidden_size, " of vision_config must be a multiple of 4 times ",
              key, " ", vision.num_heads, ": positions turn quarters of a head");
}

VisionConfig read_image_tower(const HfConfig& config, VisionConfig tower) {
  config.require_computed(config.get("attention_dropout", 0.0) == 0, "attention_dropout of vision_config must be 0");
  tower.depth = read_positive(config, "num_hidden_layers", tower.depth);
  tower.hidden_size = read_positive(config, "hidden_size", tower.hidden_size);
  tower.intermediate_size = read_positive(config, "intermediate_size", tower.intermediate_size);
  tower.num_heads = read_positive(config, "num_attention_heads", tower.num_heads);
  tower.in_channels = read_positive(config, "num_channels", 3);
  if (tower.patch_size == 0) tower.patch_size = read_positive(config, "patch_size", 16);
  tower.temporal_patch_size = 1;
  return tower;
}

void read_tower(const HfConfig& config, VisionConfig& vision, const char* activation) {
  vision.depth = config.get("depth", vision.depth);
  vision.hidden_size = config.get("hidden_size", vision.hidden_size);
  vision.intermediate_size = config.get("intermediate_size", vision.intermediate_size);
  vision.num_heads = config.get("num_heads", vision.num_heads);
  vision.in_channels = config.get<int64_t>("in_channels", 3);
  vision.patch_size = config.get("patch_size", vision.patch_size);
  vision.temporal_patch_size = config.get<int64_t>("temporal_patch_size", 2);
  vision.merge_size = config.get<int64_t>("spatial_merge_size", 2);
  vision.out_hidden_size = config.get("out_hidden_size", vision.out_hidden_size);
  vision.activation = read_activation(config, "hidden_act", activation);
  if (const auto* rope = config.find("rope_parameters"))
    vision.rotary_theta = config.get(*rope, "rope_theta", vision.rotary_theta);
  check_turned_heads(config, vision, "num_heads");
  TORCH_CHECK(vision.intermediate_size > 0 && vision.in_channels > 0 && vision.patch_size > 0 &&
                  vision.temporal_patch_size > 0 && vision.merge_size > 0,
              config.path(), ": the sizes of vision_config must be positive");
}

VisionConfig read_qwen3_tower(const HfConfig& config, const std::string& prefix) {
  VisionConfig vision{.kind = VisionKind::kQwen3,
                      .names = {.tower = prefix + "Model",
                                .patch_embed = prefix + "PatchEmbed",
                                .block = prefix + "Block",
                                .attention = prefix + "Attention",
                                .mlp = prefix + "MLP",
                                .norm = "LayerNorm",
                                .merger = prefix + "PatchMerger"},
                      .depth = 27,
                      .hidden_size = 1152,
                      .intermediate_size = 4304,
                      .num_heads = 16,
                      .patch_size = 16,
                      .out_hidden_size = 3584};
  read_tower(config, vision, "gelu_pytorch_tanh");
  const auto rows = config.get<int64_t>("num_position_embeddings", 2304);
  vision.position_side = static_cast<int64_t>(std::sqrt(static_cast<double>(rows)));
  TORCH_CHECK(vision.position_side > 0 && vision.position_side * vision.position_side == rows, config.path(),
              ": num_position_embeddings ", rows, " is not the square of a whole number");
  return vision;
}

VisionLanguageConfig connect_vision(const HfConfig& root, VisionConfig vision, const DecoderConfig& text,
                                    const char* model, int64_t image_token_id) {
  TORCH_CHECK(vision.out_hidden_size == text.hidden_size, root.path(), ": out_hidden_size ", vision.out_hidden_size,
              " of vision_config must be hidden_size ", text.hidden_size, " of the text model");
  TORCH_CHECK(vision.deepstack_blocks.size() <= static_cast<size_t>(text.num_layers), root.path(), ": ",
              vision.deepstack_blocks.size(),
              " deepstack_visual_indexes need as many layers of the text model, which has ", text.num_layers);
  return {.vision = std::move(vision),
          .model_name = model,
          .image_token_id = root.get("image_token_id", image_token_id),
          .video_token_id = root.get("video_token_id", image_token_id + 1)};
}

}  // namespace megashard
