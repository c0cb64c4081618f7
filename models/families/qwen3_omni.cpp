// The thinker of Qwen3-Omni: text with pictures, videos and sound. What speaks (talker, code2wav) is left out.
#include <nlohmann/json.hpp>

#include "models/audio/audio_encoder.h"
#include "models/config/read_vision_config.h"
#include "models/families/model_family.h"
#include "models/vision/qwen_vision.h"

namespace megashard {
namespace {

constexpr const char* kThinkerClass = "Qwen3OmniMoeThinkerModel";

/// The whole model's file has it as a part.
HfConfig thinker_config(const HfConfig& root) { return root.object("thinker_config").value_or(root); }

DecoderConfig read_thinker(const HfConfig& root) {
  const auto thinker = thinker_config(root);
  const auto text = text_config(thinker);
  const RotaryConfig rotary{.theta = 1e6, .mrope_section = {24, 20, 20}, .mrope_interleaved = true};
  auto network = read_text(thinker, {.names = class_names("Qwen3OmniMoeThinkerText"), .kv_heads = 4, .rotary = rotary});
  network.names.model = "Qwen3OmniMoeThinkerForConditionalGeneration";
  network.qk_norm = true;
  network.qkv_bias = network.attention_out_bias = text.get("attention_bias", false);
  network.tie_word_embeddings = thinker.get("tie_word_embeddings", false);
  network.moe = read_moe(text);
  return network;
}

EncoderSpecPtr read_encoders(const HfConfig& root, const DecoderConfig& text) {
  const auto thinker = thinker_config(root);
  const auto config = vision_config(thinker);
  auto tower = read_qwen3_tower(config, "Qwen3OmniMoeVision");
  tower.names.tower = "Qwen3OmniMoeVisionEncoder";
  tower.numbered_mergers = true;
  tower.deepstack_list = "merger_list";
  tower.deepstack_blocks = read_blocks(config, "deepstack_visual_indexes", {8, 16, 24}, tower.depth);
  auto vision = connect_vision(thinker, std::move(tower), text, kThinkerClass);
  vision.tokens_per_second = static_cast<double>(thinker.get<int64_t>("position_id_per_seconds", 25));
  vision.exact_times = true;
  auto audio = read_audio_config(thinker,
                                 {.names = {.tower = "Qwen3OmniMoeAudioEncoder",
                                            .layer = "Qwen3OmniMoeAudioEncoderLayer",
                                            .attention = "Qwen3OmniMoeAudioAttention"},
                                  .model_name = kThinkerClass,
                                  .depth = 32,
                                  .hidden_size = 1280,
                                  .intermediate_size = 5120,
                                  .num_heads = 20,
                                  .token_id = 151646},
                                 text.hidden_size);
  vision.sound = SoundTokens{.audio = audio.token_id,
                             .audio_start = thinker.get<int64_t>("audio_start_token_id", 151647),
                             .vision_start = thinker.get<int64_t>("vision_start_token_id", 151652)};
  return join_encoders({qwen_vision(std::move(vision)), audio_encoder(std::move(audio))});
}

/// Names in the files of the thinker alone, or below `prefix`.
WeightFiles files_below(const std::string& prefix) {
  return {.renamings = {{"model.audio_tower.", prefix + "audio_tower."},
                        {"model.visual.", prefix + "visual."},
                        {"model.language_model.", prefix + "model."},
                        {"lm_head.", prefix + "lm_head."}},
          .others = {"talker.", "code2wav."}};
}

/// transformers builds no talker then.
void write_thinker_alone(nlohmann::ordered_json& config) { config["enable_audio_output"] = false; }

const RegisterFamily kThinker({.model_type = "qwen3_omni_moe_thinker",
                               .architecture = "Qwen3OmniMoeThinkerForConditionalGeneration",
                               .read = read_thinker,
                               .encoder = read_encoders,
                               .weight_files = files_below("")});

const RegisterFamily kOmni({.model_type = "qwen3_omni_moe",
                            .architecture = "Qwen3OmniMoeForConditionalGeneration",
                            .read = read_thinker,
                            .encoder = read_encoders,
                            .weight_files = files_below("thinker."),
                            .write_part = write_thinker_alone});

}  // namespace
}  // namespace megashard
