#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

/// The network as Megatron's flags describe it, with their names and defaults (megatron-core 0.12
/// TransformerConfig and arguments.py). The four sizes and the vocabulary have no default.
struct DecoderOptions {
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t max_position_embeddings = 0;
  int64_t padded_vocab_size = 0;             ///< rows of the embedding, padded by the caller
  std::optional<int64_t> ffn_hidden_size{};  ///< unset: 4 h; with swiglu int(4 h * 2 / 3 / 64) * 64
  std::optional<int64_t> kv_channels{};      ///< unset: h / heads
  bool group_query_attention = false;
  int64_t num_query_groups = 1;
  std::string position_embedding_type = "learned_absolute";  ///< or rope, none
  double rotary_base = 10000;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  std::optional<double> rotary_seq_len_interpolation_factor{};
  bool use_rope_scaling = false;  ///< Llama 3's
  double rope_scaling_factor = 8.0;
  std::string normalization = "LayerNorm";  ///< or RMSNorm
  double norm_epsilon = 1e-5;
  bool apply_layernorm_1p = false;
  bool apply_residual_connection_post_layernorm = false;
  bool openai_gelu = false;
  bool squared_relu = false;
  bool swiglu = false;
  bool untie_embeddings_and_output_weights = false;
  bool add_bias_linear = true;  ///< false by --disable-bias-linear
  bool add_qkv_bias = false;    ///< implied by add_bias_linear
  bool qk_layernorm = false;
  double attention_dropout = 0.1;
  double hidden_dropout = 0.1;
  double init_method_std = 0.02;
};

}  // namespace megashard
