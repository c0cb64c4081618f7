// Qwen2.5-VL, as published and as written by transformers 5.
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/qwen_vision.h"

namespace megashard {
namespace {

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
                      .num_heads = 16,
                      .patch_size = 14,
                      .out_hidden_size = 3584,
                      .numbered_mergers = true};
  read_tower(config, vision, "silu");
  vision.window_size = config.get<int64_t>("window_size", 112);
  vision.full_attention_blocks = read_blocks(config, "fullatt_block_indexes", {7, 15, 23, 31}, vision.depth);
  TORCH_CHECK(vision.window_size / vision.merge_size / vision.patch_size > 0, config.path(), ": window_size ",
              vision.window_size, " of vision_config is smaller than the ", vision.merge_size, " patches of ",
              vision.patch_size, " pixels that are merged");
  return vision;
}

EncoderSpecPtr read_qwen2_5_vl(const HfConfig& root, const DecoderConfig& text) {
  const auto vision = vision_config(root);
  auto config = connect_vision(root, read_qwen2_5_tower(vision), text, "Qwen2_5_VLModel");
  config.tokens_per_second = vision.get("tokens_per_second", 4.0);
  return qwen_vision(std::move(config));
}

const RegisterFamily kQwen25Vl({.model_type = "qwen2_5_vl",
                                .architecture = "Qwen2_5_VLForConditionalGeneration",
                                .read = read_qwen2_5_text,
                                .encoder = read_qwen2_5_vl,
                                .weight_files = {
                                    .renamings = {{"model.visual.", "visual."}, {"model.language_model.", "model."}}}});

}  // namespace
}  // namespace megashard
