// Qwen3-VL and Qwen3-VL-MoE, as published and as written by transformers 5.
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/qwen_vision.h"

namespace megashard {
namespace {

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

/// Features of some blocks are added to the decoder's first layers.
EncoderSpecPtr with_deepstack(const HfConfig& root, const DecoderConfig& text, const std::string& prefix) {
  const auto config = vision_config(root);
  auto vision = read_qwen3_tower(config, prefix + "Vision");
  vision.deepstack_blocks = read_blocks(config, "deepstack_visual_indexes", {8, 16, 24}, vision.depth);
  return qwen_vision(connect_vision(root, std::move(vision), text, (prefix + "Model").c_str()));
}

EncoderSpecPtr read_qwen3_vl(const HfConfig& root, const DecoderConfig& text) {
  return with_deepstack(root, text, "Qwen3VL");
}

EncoderSpecPtr read_qwen3_vl_moe(const HfConfig& root, const DecoderConfig& text) {
  return with_deepstack(root, text, "Qwen3VLMoe");
}

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
