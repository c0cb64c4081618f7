#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

enum class PositionEmbeddingType { kLearnedAbsolute, kRope, kMrope, kNone };
enum class Normalization { kLayerNorm, kRmsNorm };
enum class RopeType { kRope, kYarn };
enum class AttentionMaskType { kCausal, kGeneral };
enum class SoftmaxType { kVanilla, kLearnable };

/// Megatron's group "network size", with its names and defaults. Unset optionals were not given; those marked (derived)
/// are computed by validate_arguments. With --hf-model the sizes come from config.json instead.
struct NetworkArguments {
  std::optional<int64_t> num_layers;          // (derived) from encoder_num_layers, if given
  std::optional<int64_t> encoder_num_layers;  // another name for num_layers
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> ffn_hidden_size;  // (derived) 4 * hidden; swiglu: 8/3 rounded down to 64
  std::optional<int64_t> num_attention_heads;
  std::optional<int64_t> kv_channels;  // (derived) head size, hidden / heads
  bool group_query_attention = false;
  int64_t num_query_groups = 1;  // key/value heads, with group_query_attention
  std::optional<int64_t> max_position_embeddings;
  // (derived) kRope with use_rotary_position_embeddings
  PositionEmbeddingType position_embedding_type = PositionEmbeddingType::kLearnedAbsolute;
  bool use_rotary_position_embeddings = false;
  int64_t rotary_base = 10000;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  std::optional<int64_t> rotary_seq_len_interpolation_factor;
  bool use_rope_scaling = false;  // Llama 3's scaling
  double rope_scaling_factor = 8.0;
  int64_t make_vocab_size_divisible_by = 128;
  Normalization normalization = Normalization::kLayerNorm;
  double norm_epsilon = 1e-5;
  bool apply_layernorm_1p = false;
  bool openai_gelu = false;
  bool bias_gelu_fusion = true;
  bool squared_relu = false;
  bool swiglu = false;
  std::optional<int64_t> logits_at_once;
  bool apply_tiled_mlp = false;
  int64_t tiled_num_shards = 4;
  std::optional<int64_t> lora_r;  // unset: no adapters
  double lora_alpha = 16;
  double lora_dropout = 0;
  std::vector<std::string> lora_target_modules;
  bool untie_embeddings_and_output_weights = false;
  bool add_bias_linear = true;
  bool add_qkv_bias = false;  // (derived) true with add_bias_linear
  bool qk_layernorm = false;
  bool attention_output_gate = false;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;                    // kLearnable: with sinks
  AttentionMaskType attention_mask_type = AttentionMaskType::kCausal;  // kGeneral: models of latents
  std::optional<std::string> no_rope_freq;           // layers without positions; see layer_frequency.h
  std::optional<std::string> window_size;            // see keys_before(); unset: no window
  std::optional<std::string> window_attn_skip_freq;  // layers with a window; unset: all
  bool multi_latent_attention = false;
  std::optional<int64_t> q_lora_rank;  // unset: queries come from hidden states
  int64_t kv_lora_rank = 32;
  int64_t qk_head_dim = 128;         // channels of a query and key without positions
  int64_t qk_pos_emb_head_dim = 64;  // channels that turn
  int64_t v_head_dim = 128;
  std::optional<RopeType> rope_type;   // (derived) kYarn with multi_latent_attention, else kRope
  double rotary_scaling_factor = 1.0;  // stretches 4,096 positions (YaRN)
  double mscale = 1.0;
  double mscale_all_dim = 0.0;
  std::optional<int64_t> mtp_num_layers;  // unset: none
  double mtp_loss_scaling_factor = 0.1;
  bool add_position_embedding = true;  // Megatron compares it when it loads our args
};

/// The keys before its own that a query sees by --window-size: LEFT of "LEFT,0". Throws UsageError for another form.
int64_t keys_before(const std::string& window_size);

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_network_options(std::vector<Option>& rows);
/// Computes derived sizes of a network described by flags (--num-layers ..., not --hf-model).
void derive_network_sizes(Arguments& arguments, Mistakes& rules);
/// Checks the rules between sizes, and those of adapters.
void check_network(Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
