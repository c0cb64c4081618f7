#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/config/tensor_parallel_ranks.h"
#include "models/config/weight_files.h"

namespace megashard {

enum class NormKind { kRmsNorm, kLayerNorm };
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu };
enum class PositionKind { kRotary, kLearned, kNone };

/// Rotary frequencies, as transformers' ROPE_INIT_FUNCTIONS of these names compute them.
struct RotaryConfig {
  enum class Kind { kDefault, kLinear, kLlama3, kYarn, kDynamic, kLongrope };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  double fraction = 1.0;  ///< of head_dim that turns
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_positions = 8192;  ///< kDynamic: max_position_embeddings
  /// M-RoPE: how many channel pairs turn by each of three position ids (time, height, width), one
  /// section behind the other or, interleaved, in turns (T H W T H W ... T T). Empty: one id.
  std::vector<int64_t> mrope_section{};
  bool mrope_interleaved = false;
  bool interleaved = false;              ///< neighbouring channels turn together, not those of the two halves
  double magnitude = 1.0;                ///< on cosines and sines (kYarn, kLongrope: attention_factor)
  double beta_fast = 32, beta_slow = 1;  ///< kYarn: turns in the original positions between which it blends
  bool truncate = true;                  ///< kYarn: that range ends on whole channels
  /// kLongrope, of each pair: divisors of the frequencies up to the original positions, and beyond.
  std::vector<double> short_factor{}, long_factor{};

  /// Whether a longer sequence turns all of its positions by other frequencies.
  bool depends_on_length() const { return kind == Kind::kDynamic || kind == Kind::kLongrope; }
  bool operator==(const RotaryConfig&) const = default;
};

/// Class names that the modules of a family answer, for wrap policies.
struct ModuleNames {
  std::string norm, rotary, attention, mlp, layer, decoder, model;
  std::string moe{}, router{};
};

/// Layers whose MLP is a choice of experts.
struct MoeConfig {
  int64_t num_experts = 0;  ///< 0: a dense network
  int64_t experts_per_token = 0;
  int64_t intermediate_size = 0;    ///< of one expert
  bool normalise_weights = false;   ///< a token's weights are made to sum to 1
  double aux_loss_coef = 0;         ///< of transformers' load-balancing loss; 0: without
  double balance_coef = 0;          ///< of Megatron's, of each layer; 0: without
  bool balances_sequences = false;  ///< that is of each sequence (Megatron's seq_aux_loss), not of a microbatch
  double z_loss_coef = 0;           ///< of Megatron's z-loss of each layer; 0: without
  int64_t sparse_step = 1;          ///< every how many layers one has experts
  std::vector<int64_t> dense_layers{};
  int64_t ep_size = 1;  ///< ranks that have different experts (--expert-model-parallel-size)
  int64_t ep_rank = 0;  ///< of these, this rank

  bool has_megatron_losses() const { return balance_coef != 0 || z_loss_coef != 0; }
  bool is_sparse(int64_t layer) const;
  bool has_expert(int64_t expert) const { return expert / (num_experts / ep_size) == ep_rank; }
};

/// A decoder-only network, whatever described it.
struct DecoderConfig {
  ModuleNames names{};
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  NormKind norm = NormKind::kRmsNorm;
  double norm_eps = 1e-6;
  bool zero_centered_norm = false;  ///< factors are 1 + weight (Gemma, --apply-layernorm-1p)
  bool sandwich_norms = false;      ///< norms behind attention and MLP, too (Gemma)
  Activation activation = Activation::kSilu;
  bool gated_mlp = true;
  int64_t mlp_tiles = 1;  ///< pieces of a sequence that an MLP computes one by one
  PositionKind positions = PositionKind::kRotary;
  RotaryConfig rotary{};
  /// Keys that a query sees in these layers, its own and those just before it; 0: all before it.
  int64_t sliding_window = 0;
  std::vector<int64_t> sliding_layers{};
  std::optional<RotaryConfig> sliding_rotary{};  ///< of these layers, where it is another
  std::optional<double> attention_scale{};       ///< of the products of queries and keys; 1 / sqrt(head_dim)
  double embedding_scale = 1;                    ///< rounded to the weight's dtype, as in transformers
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;
  bool tie_word_embeddings = false;
  double attention_dropout = 0;
  double hidden_dropout = 0;
  double init_std = 0.02;
  double output_init_scale = 1;  ///< on init_std of the projections that end a residual branch
  std::optional<int64_t> pad_token_id{};
  MoeConfig moe{};
  /// Sizes above are the whole network's; models of one configuration are pieces on the same rank.
  TensorParallelRanksPtr tensor_parallel = std::make_shared<TensorParallelRanks>();
  WeightFiles weight_files{};

  bool is_sliding(int64_t layer) const;
};

}  // namespace megashard
