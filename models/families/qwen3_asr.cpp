// Qwen3-ASR, as published (in thinker_config) and as written by transformers 5.
#include "models/audio/audio_encoder.h"
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

bool is_published(const HfConfig& root) { return root.object("thinker_config").has_value(); }

HfConfig model_config(const HfConfig& root) { return root.object("thinker_config").value_or(root); }

DecoderConfig read_asr_text(const HfConfig& root) {
  const auto model = model_config(root);
  const auto text = text_config(model);
  const bool published = is_published(root);
  const int64_t kv_heads = published ? 32 : 8;
  const double theta = published ? 5e6 : 1e4;
  auto network = read_text(model, {.names = class_names(published ? "Qwen3ASRThinkerText" : "Qwen3"),
                                   .kv_heads = kv_heads,
                                   .head_dim = 128,
                                   .rotary = {.theta = theta}});
  network.names.model = published ? "Qwen3ASRThinkerForConditionalGeneration" : "Qwen3ASRForConditionalGeneration";
  network.qk_norm = true;
  network.qkv_bias = network.attention_out_bias = text.get("attention_bias", false);
  network.tie_word_embeddings =
      published ? text.get("tie_word_embeddings", false) : model.get("tie_word_embeddings", true);
  return network;
}

EncoderSpecPtr read_asr_encoder(const HfConfig& root, const DecoderConfig& text) {
  const bool published = is_published(root);
  return audio_encoder(read_audio_config(model_config(root),
                                         {.names = {.tower = published ? "Qwen3ASRAudioEncoder" : "Qwen3ASREncoder",
                                                    .layer = "Qwen3ASRAudioEncoderLayer",
                                                    .attention = "Qwen3ASRAudioAttention",
                                                    .projector = "Qwen3ASRMultiModalProjector"},
                                          .model_name = "Qwen3ASRModel",
                                          .depth = published ? 32 : 24,
                                          .hidden_size = published ? 1280 : 1024,
                                          .intermediate_size = published ? 5120 : 4096,
                                          .num_heads = published ? 20 : 16,
                                          .token_id = published ? 151646 : 151676,
                                          .has_projector = true,
                                          .pads_short_clips = !published},
                                         text.hidden_size));
}

WeightFiles asr_files(const HfConfig& root) {
  if (!is_published(root)) return {};
  return {.renamings = {{"model.multi_modal_projector.linear_1.", "thinker.audio_tower.proj1."},
                        {"model.multi_modal_projector.linear_2.", "thinker.audio_tower.proj2."},
                        {"model.audio_tower.", "thinker.audio_tower."},
                        {"model.language_model.", "thinker.model."},
                        {"lm_head.", "thinker.lm_head."}}};
}

const RegisterFamily kQwen3Asr({.model_type = "qwen3_asr",
                                .architecture = "Qwen3ASRForConditionalGeneration",
                                .read = read_asr_text,
                                .encoder = read_asr_encoder,
                                .files = asr_files});

}  // namespace
}  // namespace megashard
