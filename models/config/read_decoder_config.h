#pragma once

#include <functional>
#include <string>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Defaults of transformers' config class of a family, for fields missing in config.json.
struct DecoderDefaults {
  ModuleNames names;
  int64_t kv_heads = 0;  ///< 0: equal to the number of heads
  int64_t head_dim = 0;  ///< 0: hidden_size / heads
  int64_t max_positions = 32768;
  double norm_eps = 1e-6;
  RotaryConfig rotary{};
  bool rotates_by_layer = false;  ///< the family calls read_rotary_by_layer itself
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  bool tie_word_embeddings = false;
};

/// transformers' class names of a family: LlamaRMSNorm, LlamaDecoderLayer, LlamaForCausalLM, ...
ModuleNames class_names(const std::string& prefix);

/// Reads the fields common to all decoders: sizes, norm_eps, activation, rotary embedding, tying, dropout, padding.
/// Throws for missing, inconsistent and unsupported values.
DecoderConfig read_decoder(const HfConfig& config, const DecoderDefaults& defaults);

Activation read_activation(const HfConfig& config, const char* key, const std::string& fallback);

/// Reads sliding_window: `fallback` if absent, 0 if null.
int64_t read_sliding_window(const HfConfig& config, int64_t fallback);
/// The layers that layer_types calls "sliding_attention"; without layer_types those selected by `slides`. Empty without
/// a window.
std::vector<int64_t> read_sliding_layers(const HfConfig& config, const DecoderConfig& network,
                                         const std::function<bool(int64_t layer)>& slides);
/// Reads a window for all layers, as in Mistral, or for those of layer_types (transformers' Ministral).
void read_window_of_all_layers(const HfConfig& config, DecoderConfig& network);
/// Reads windows if use_sliding_window is set, as in Qwen: for the layers of layer_types, or from max_window_layers on.
void read_optional_windows(const HfConfig& config, DecoderConfig& network);

/// Reads num_experts, num_experts_per_tok, ... of Qwen's families.
MoeConfig read_moe(const HfConfig& config);

}  // namespace megashard
