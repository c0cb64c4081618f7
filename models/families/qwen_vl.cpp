// Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, as published and as written by transformers 5.
#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"
#include "models/vision/qwen_vision.h"

namespace megashard {
namespace {

/// Older files have the text model's keys at the top level, newer ones in text_config. Throws if both differ.
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

/// Reads the fields of all decoders. Throws if position parameters at the top level differ.
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

DecoderConfig read_qwen2_5_text(const HfConfig& root) {
  auto network = read_text(root, {.names = class_names("Qwen2_5_VL"),
                                  .kv_heads = 8,
                                  .norm_eps = 1e-5,
                                  .rotary = {.theta = 1e6, .mrope_section = {16, 24, 24}}});
  network.names.mlp = "Qwen2MLP";
  network.names.decoder = "Qwen2_5_VLTextModel";
  network.names.model = "Qwen2_5_VLForConditionalGeneration";
  network.qkv_bias = true;
  network.tie_word_embeddings =  // transformers 4 writes it to text_config
      root.get("tie_word_embeddings", false) || network.tie_word_embeddings;
  read_optional_windows(text_config(root), network);
  return network;
}

DecoderConfig read_qwen3_text(const HfConfig& root, DecoderDefaults defaults, const char* model) {
  defaults.rotary = {.theta = 500000, .mrope_section = {24, 20, 20}, .mrope_interleaved = true};
  auto network = read_text(root, defaults);
  network.names.model = model;
  network.qk_norm = true;
  network.qkv_bias = network.attention_out_bias = text_config(root).get("attention_bias", false);
  network.tie_word_embeddings = root.get("tie_word_embeddings", false);
  return network;
}

DecoderConfig read_qwen3_vl_text(const HfConfig& root) {
  return read_qwen3_text(root, {.names = class_names("Qwen3VLText"), .kv_heads = 32, .head_dim = 128},
                         "Qwen3VLForConditionalGeneration");
}

DecoderConfig read_qwen3_vl_moe_text(const HfConfig& root) {
  auto network = read_qwen3_text(root, {.names = class_names("Qwen3VLMoeText"), .kv_heads = 16},
                                 "Qwen3VLMoeForConditionalGeneration");
  network.moe = read_moe(text_config(root));
  network.moe.router.normalise_weights = true;  // not in config.json
  return network;
}

std::vector<int64_t> block_numbers(const HfConfig& config, const char* key, std::vector<int64_t> fallback,
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

/// Reads the fields of both generations, with the defaults of one.
void read_tower(const HfConfig& config, VisionConfig& vision, const char* activation) {
  vision.depth = config.get("depth", vision.depth);
  vision.hidden_size = config.get("hidden_size", vision.hidden_size);
  vision.intermediate_size = config.get("intermediate_size", vision.intermediate_size);
  vision.num_heads = config.get<int64_t>("num_heads", 16);
  vision.in_channels = config.get<int64_t>("in_channels", 3);
  vision.patch_size = config.get("patch_size", vision.patch_size);
  vision.temporal_patch_size = config.get<int64_t>("temporal_patch_size", 2);
  vision.merge_size = config.get<int64_t>("spatial_merge_size", 2);
  vision.out_hidden_size = config.get<int64_t>("out_hidden_size", 3584);
  vision.activation = read_activation(config, "hidden_act", activation);
  if (const auto* rope = config.find("rope_parameters"))
    vision.rotary_theta = config.get(*rope, "rope_theta", vision.rotary_theta);
  TORCH_CHECK(vision.depth > 0 && vision.num_heads > 0 && vision.hidden_size % (4 * vision.num_heads) == 0,
              config.path(), ": hidden_size ", vision.hidden_size,
              " of vision_config must be a multiple of 4 times num_heads ", vision.num_heads,
              ": positions turn quarters of a head");
  TORCH_CHECK(vision.intermediate_size > 0 && vision.in_channels > 0 && vision.patch_size > 0 &&
                  vision.temporal_patch_size > 0 && vision.merge_size > 0,
              config.path(), ": the sizes of vision_config must be positive");
}

VisionConfig read_qwen2_5_tower(const HfConfig& config) {
  VisionConfig vision{.kind = VisionKind::kQwen2_5,
                      .names = {.tower = "Qwen2_5_VisionTransformerPretrainedModel",
                                .patch_embed = "Qwen2_5_VisionPatchEmbed",
                                .block = "Qwen2_5_VLVisionBlock",
                                .attention = "Qwen2_5_VLVisionAttention",
                                .mlp = "Qwen2_5_VLMLP",
                                .norm = "Qwen2_5_VLRMSNorm",
                                .merger = "Qwen2_5_VLPatchMerger"},
                      .depth = 32,
                      .hidden_size = 3584,
                      .intermediate_size = 3420,
                      .patch_size = 14};
  read_tower(config, vision, "silu");
  vision.window_size = config.get<int64_t>("window_size", 112);
  vision.full_attention_blocks = block_numbers(config, "fullatt_block_indexes", {7, 15, 23, 31}, vision.depth);
  TORCH_CHECK(vision.window_size / vision.merge_size / vision.patch_size > 0, config.path(), ": window_size ",
              vision.window_size, " of vision_config is smaller than the ", vision.merge_size, " patches of ",
              vision.patch_size, " pixels that are merged");
  return vision;
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
                      .patch_size = 16};
  read_tower(config, vision, "gelu_pytorch_tanh");
  const auto rows = config.get<int64_t>("num_position_embeddings", 2304);
  vision.position_side = static_cast<int64_t>(std::sqrt(static_cast<double>(rows)));
  TORCH_CHECK(vision.position_side > 0 && vision.position_side * vision.position_side == rows, config.path(),
              ": num_position_embeddings ", rows, " is not the square of a whole number");
  vision.deepstack_blocks = block_numbers(config, "deepstack_visual_indexes", {8, 16, 24}, vision.depth);
  return vision;
}

/// Connects tower and decoder. `model` is the class of the module that contains both.
VisionLanguageConfig meet(const HfConfig& root, VisionConfig vision, const DecoderConfig& text, const char* model) {
  TORCH_CHECK(vision.out_hidden_size == text.hidden_size, root.path(), ": out_hidden_size ", vision.out_hidden_size,
              " of vision_config must be hidden_size ", text.hidden_size, " of the text model");
  TORCH_CHECK(vision.deepstack_blocks.size() <= static_cast<size_t>(text.num_layers), root.path(), ": ",
              vision.deepstack_blocks.size(),
              " deepstack_visual_indexes need as many layers of the text model, which has ", text.num_layers);
  return {.vision = std::move(vision),
          .model_name = model,
          .image_token_id = root.get<int64_t>("image_token_id", 151655),
          .video_token_id = root.get<int64_t>("video_token_id", 151656)};
}

HfConfig vision_config(const HfConfig& root) {
  const auto vision = root.object("vision_config");
  TORCH_CHECK(vision, root.path(),
              ": a vision-language model needs model_type qwen2_5_vl, qwen3_vl or qwen3_vl_moe, and a vision_config");
  return *vision;
}

EncoderSpecPtr read_qwen2_5_vl(const HfConfig& root, const DecoderConfig& text) {
  const auto vision = vision_config(root);
  auto config = meet(root, read_qwen2_5_tower(vision), text, "Qwen2_5_VLModel");
  config.tokens_per_second = vision.get("tokens_per_second", 4.0);
  return qwen_vision(std::move(config));
}

EncoderSpecPtr read_qwen3_vl(const HfConfig& root, const DecoderConfig& text) {
  return qwen_vision(meet(root, read_qwen3_tower(vision_config(root), "Qwen3VLVision"), text, "Qwen3VLModel"));
}

EncoderSpecPtr read_qwen3_vl_moe(const HfConfig& root, const DecoderConfig& text) {
  return qwen_vision(meet(root, read_qwen3_tower(vision_config(root), "Qwen3VLMoeVision"), text, "Qwen3VLMoeModel"));
}

const RegisterFamily kQwen25Vl({.model_type = "qwen2_5_vl",
                                .architecture = "Qwen2_5_VLForConditionalGeneration",
                                .read = read_qwen2_5_text,
                                .encoder = read_qwen2_5_vl,
                                .weight_files = {
                                    .renamings = {{"model.visual.", "visual."}, {"model.language_model.", "model."}}}});

const RegisterFamily kQwen3Vl({.model_type = "qwen3_vl",
                               .architecture = "Qwen3VLForConditionalGeneration",
                               .read = read_qwen3_vl_text,
                               .encoder = read_qwen3_vl});

const RegisterFamily kQwen3VlMoe({.model_type = "qwen3_vl_moe",
                                  .architecture = "Qwen3VLMoeForConditionalGeneration",
                                  .read = read_qwen3_vl_moe_text,
                                  .encoder = read_qwen3_vl_moe,
                                  .weight_files = {.experts = {.form = ExpertFiles::Form::kTransposed}}});

}  // namespace
}  // namespace megashard
