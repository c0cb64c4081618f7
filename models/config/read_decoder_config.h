#pragma once

#include <functional>
#include <string>

#include "models/config/decoder_config.h"
#include "models/config/hf_config.h"

namespace megashard {

/// What transformers' config class of a family has for the fields that config.json leaves out.
struct DecoderDefaults {
  ModuleNames names;
  int64_t kv_heads = 0;  ///< 0: as many as heads
  int64_t head_dim = 0;  ///< 0: hidden_size / heads
  int64_t max_positions = 32768;
  double norm_eps = 1e-6;
  RotaryConfig rotary{};
  bool rotates_by_layer = false;  ///< the family reads its positions itself (read_rotary_by_layer)
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  bool tie_word_embeddings = false;
};

/// transformers' classes of a family: LlamaRMSNorm, LlamaDecoderLayer, LlamaForCausalLM, ...
ModuleNames class_names(const std::string& prefix);

/// The fields that all decoders have: sizes, norm_eps, activation, rotary positions, tying, dropout,
/// padding. Throws an error for what is missing, does not fit, or is not computed here.
DecoderConfig read_decoder(const HfConfig& config, const DecoderDefaults& defaults);

Activation read_activation(const HfConfig& config, const char* key, const std::string& fallback);

/// sliding_window: `fallback` where it is absent, 0 where it is null.
int64_t read_sliding_window(const HfConfig& config, int64_t fallback);
/// The layers that layer_types calls "sliding_attention"; without it those of which `slides` says so. There are none
/// without a window.
std::vector<int64_t> read_sliding_layers(const HfConfig& config, const DecoderConfig& network,
                                         const std::function<bool(int64_t layer)>& slides);
/// The window of all layers, as Mistral's, or of those of layer_types (transformers' Ministral).
void read_window_of_all_layers(const HfConfig& config, DecoderConfig& network);
/// Windows only with use_sliding_window, as Qwen's: those of layer_types, or from max_window_layers on.
void read_optional_windows(const HfConfig& config, DecoderConfig& network);

/// num_experts, num_experts_per_tok, ... of Qwen's families.
MoeConfig read_moe(const HfConfig& config);

}  // namespace megashard
