#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Defaults of transformers' config class of a family, for fields missing in config.json.
struct DecoderDefaults {
  ModuleNames names;
  int64_t kv_heads = 0;                 ///< 0: equal to the number of heads
  int64_t head_dim = 0;                 ///< 0: hidden_size / heads
  std::optional<int64_t> num_layers{};  ///< unset: config.json must say it, as the next two
  std::optional<int64_t> num_heads{}, vocab_size{};
  int64_t max_positions = 32768;
  std::optional<int64_t> intermediate_size{};  ///< unset: config.json must say it
  double norm_eps = 1e-6;
  const char* norm_eps_key = "rms_norm_eps";
  const char* head_dim_key = "head_dim";
  RotaryConfig rotary{};
  bool rotates_partially = false;  ///< reads partial_rotary_factor, or takes rotary.fraction
  bool rotates_by_layer = false;   ///< the family calls read_rotary_by_layer itself
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  bool tie_word_embeddings = false;
  double attention_dropout = 0;
  std::optional<int64_t> pad_token_id{};
};

/// The same for the experts of a family.
struct MoeDefaults {
  int64_t num_experts = 128;
  int64_t experts_per_token = 8;
  const char* intermediate_key = "moe_intermediate_size";
  int64_t intermediate_size = 768;
};

/// transformers' class names of a family: LlamaRMSNorm, LlamaDecoderLayer, LlamaForCausalLM, ...
ModuleNames class_names(const std::string& prefix);

/// Reads the fields common to all decoders: sizes, norm_eps, activation, rotary embedding, tying, dropout, padding.
/// Throws for missing, inconsistent and unsupported values.
DecoderConfig read_decoder(const HfConfig& config, const DecoderDefaults& defaults);

/// Throws unless the number is positive.
int64_t read_positive(const HfConfig& config, const char* key, int64_t fallback);

Activation read_activation(const HfConfig& config, const char* key, const std::string& fallback);

/// The layers from 0 to num_layers - 1 that are selected.
std::vector<int64_t> layers_where(int64_t num_layers, const std::function<bool(int64_t layer)>& selected);
/// Reads sliding_window: `fallback` if absent (0: none), 0 if null.
int64_t read_sliding_window(const HfConfig& config, int64_t fallback);
/// The layers without positions: no_rope_layers says 1 for layers with positions; without it every
/// no_rope_layer_interval-th has none.
std::vector<int64_t> read_unrotated_layers(const HfConfig& config, int64_t num_layers);
/// The layers that layer_types calls "sliding_attention"; without layer_types those selected by `slides`. Empty without
/// a window.
std::vector<int64_t> read_sliding_layers(const HfConfig& config, const DecoderConfig& network,
                                         const std::function<bool(int64_t layer)>& slides);
/// Throws if layer_types says that a layer slides, for a family without windows.
void require_no_windows(const HfConfig& config, const DecoderConfig& network);
/// Sets sliding_layers to all layers if there is a window, else to none. Throws if layer_types says otherwise.
void slide_all_or_no_layers(const HfConfig& config, DecoderConfig& network);
/// Reads a window for all layers, as in Mistral, or for those of layer_types (transformers' Ministral).
void read_window_of_all_layers(const HfConfig& config, DecoderConfig& network);
/// Reads windows if use_sliding_window is set, as in Qwen: for the layers of layer_types, or from max_window_layers on.
void read_optional_windows(const HfConfig& config, DecoderConfig& network);

/// Heads of the layers without a window: transformers' per_layer_config, which must say the same of all of them and
/// nothing else; `published` without it. Throws unless the key heads divide the heads.
HeadSizes read_global_heads(const HfConfig& config, const DecoderConfig& network, HeadSizes published);

/// Reads the entry of layer_types (`key`) for layer `index`. Throws unless it is one of `known`, and there is one for
/// each layer.
std::string read_layer_type(const HfConfig& config, const std::vector<std::string>& known, int64_t num_layers,
                            int64_t index, const char* key = "layer_types");

/// Reads num_experts, num_experts_per_tok, ... of Qwen's and Mixtral's families.
MoeConfig read_moe(const HfConfig& config, const MoeDefaults& defaults = {});

/// Defaults of DeepSeek's keys.
struct GroupedMoeDefaults {
  int64_t num_experts, experts_per_token, intermediate_size;
  int64_t shared_experts = 1;
  int64_t dense_layers = 1;
  int64_t groups = 1, chosen_groups = 1;
  double scale = 1;
  /// Names of keys: the published one, and transformers' alias.
  std::pair<const char*, const char*> experts_keys{"n_routed_experts", "num_local_experts"};
  std::pair<const char*, const char*> per_token_keys{"num_experts_per_tok", "num_experts_per_tok"};
  std::pair<const char*, const char*> shared_keys{"n_shared_experts", "n_shared_experts"};
  std::pair<const char*, const char*> groups_keys{"n_group", "n_group"};
  std::pair<const char*, const char*> normalises_keys{"norm_topk_prob", "norm_topk_prob"};
};
/// Reads n_routed_experts, n_shared_experts, n_group, first_k_dense_replace, ... of DeepSeek-V3's and GLM-4.5's
/// families: experts by sigmoid scores and a correction, within groups, beside a shared expert.
MoeConfig read_grouped_moe(const HfConfig& config, const GroupedMoeDefaults& defaults, int64_t num_layers);

/// Sets latent attention: q_lora_rank (null: 0), kv_lora_rank, qk_nope_head_dim, v_head_dim and attention_bias. Throws
/// for fewer heads of keys than of queries.
void read_latent(const HfConfig& config, DecoderConfig& network, const LatentConfig& defaults);

}  // namespace megashard
