// Gemma 3, the text model alone, and behind SigLIP's tower.
#include <cmath>
#include <tuple>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/siglip_vision.h"

namespace megashard {
namespace {

void require_no_softcapping(const HfConfig& config) {
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping"})
    config.require_computed(config.find(key) == nullptr, key, " is not supported; take a model without it");
  config.require_computed(!config.get_or_null("use_bidirectional_attention", false),
                          "use_bidirectional_attention is not supported; take a causal model");
}

DecoderConfig read_gemma3(const HfConfig& config) {
  require_no_softcapping(config);
  auto network = read_decoder(config, {.names = class_names("Gemma3"),
                                       .kv_heads = 4,
                                       .head_dim = 256,
                                       .num_layers = 26,
                                       .num_heads = 8,
                                       .vocab_size = 262208,
                                       .max_positions = 131072,
                                       .rotates_by_layer = true,
                                       .activation_key = "hidden_activation",
                                       .activation = "gelu_pytorch_tanh",
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  network.names.decoder = "Gemma3TextModel";
  network.qk_norm = network.zero_centered_norm = network.sandwich_norms = true;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  const auto scalar = read_positive(config, "query_pre_attn_scalar", 256);
  network.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  network.embedding_scale = std::sqrt(static_cast<double>(network.hidden_size));
  std::tie(network.rotary, network.sliding_rotary) =
      read_rotary_by_layer(config, /*full_theta=*/1e6, "rope_local_base_freq", /*sliding_theta=*/1e4, network);
  const auto pattern = read_positive(config, "sliding_window_pattern", 6);
  network.sliding_window = read_sliding_window(config, 4096);
  network.sliding_layers =
      read_sliding_layers(config, network, [pattern](int64_t layer) { return (layer + 1) % pattern != 0; });
  return network;
}

DecoderConfig read_text_of_gemma3(const HfConfig& root) {
  auto network = read_gemma3(text_config(root));
  network.names.model = "Gemma3ForConditionalGeneration";
  network.tie_word_embeddings = root.get("tie_word_embeddings", true);
  return network;
}

VisionConfig read_siglip(const HfConfig& config, const HfConfig& root, const DecoderConfig& text) {
  TORCH_CHECK(!config.get("vision_use_head", true), config.path(),
              ": vision_use_head must be false: a head of the tower is not supported");
  auto vision = read_image_tower(config, {.names = {.tower = "SiglipVisionModel",
                                                    .block = "SiglipEncoderLayer",
                                                    .attention = "SiglipAttention",
                                                    .mlp = "SiglipMLP",
                                                    .norm = "LayerNorm"},
                                          .depth = 12,
                                          .hidden_size = 768,
                                          .intermediate_size = 3072,
                                          .num_heads = 12,
                                          .out_hidden_size = text.hidden_size,
                                          .activation = read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
                                          .norm_eps = config.get("layer_norm_eps", 1e-6)});
  vision.fixed_side = read_positive(config, "image_size", 224) / vision.patch_size;
  const auto tokens = read_positive(root, "mm_tokens_per_image", 256);
  const auto features = static_cast<int64_t>(std::sqrt(static_cast<double>(tokens)));
  TORCH_CHECK(features * features == tokens && vision.fixed_side >= features && vision.fixed_side % features == 0,
              root.path(), ": mm_tokens_per_image ", tokens, " must be a square of a number that divides the ",
              vision.fixed_side, " patches of a side");
  vision.merge_size = vision.fixed_side / features;
  return vision;
}

EncoderSpecPtr read_gemma3_vision(const HfConfig& root, const DecoderConfig& text) {
  VisionLanguageConfig config{.vision = read_siglip(vision_config(root), root, text),
                              .model_name = "Gemma3Model",
                              .image_token_id = root.get<int64_t>("image_token_index", 262144),
                              .video_token_id = -1,
                              .mrope = false,
                              .sees_whole = true};
  TORCH_CHECK(config.vision.hidden_size % config.vision.num_heads == 0, root.path(), ": hidden_size ",
              config.vision.hidden_size, " of vision_config must be a multiple of num_attention_heads ",
              config.vision.num_heads);
  auto norm = hidden_norm(text);
  norm.width = config.vision.hidden_size;
  norm.eps = config.vision.norm_eps;
  return siglip_vision(std::move(config), std::move(norm));
}

const RegisterFamily kGemma3({.model_type = "gemma3",
                              .architecture = "Gemma3ForConditionalGeneration",
                              .read = read_text_of_gemma3,
                              .encoder = read_gemma3_vision,
                              .weight_files = {.renamings = {{"model.vision_tower.", "vision_tower.vision_model."},
                                                             {"model.vision_tower.", "vision_tower."},
                                                             {"model.multi_modal_projector.", "multi_modal_projector."},
                                                             {"model.language_model.", "language_model.model."},
                                                             {"lm_head.", "language_model.lm_head."}}}});

const RegisterFamily kGemma3Text({.model_type = "gemma3_text",
                                  .architecture = "Gemma3ForCausalLM",
                                  .read = read_gemma3});

}  // namespace
}  // namespace megashard
