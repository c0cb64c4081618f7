#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

enum class NormKind { kRmsNorm, kLayerNorm };
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu, kQuickGelu };
enum class PositionKind { kRotary, kLearned, kNone };

/// Rotary embedding parameters, as in transformers' ROPE_INIT_FUNCTIONS of these names.
struct RotaryConfig {
  /// kProportional: the first `fraction` of all pairs of a head turn, at the angles of these pairs.
  enum class Kind { kDefault, kLinear, kLlama3, kYarn, kDynamic, kLongrope, kProportional };
  Kind kind = Kind::kDefault;
  int64_t head_dim = 0;  ///< channels of a head that the tables turn; 0: DecoderConfig's
  double theta = 10000;
  double fraction = 1.0;  ///< rotated part of head_dim
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_positions = 8192;  ///< kDynamic: max_position_embeddings
  /// M-RoPE: numbers of channel pairs rotated by each of three position ids (time, height, width), as consecutive
  /// sections or, interleaved, alternating (T H W T H W ... T T). Empty: one position id.
  std::vector<int64_t> mrope_section{};
  bool mrope_interleaved = false;
  bool interleaved = false;              ///< rotates pairs of neighbours instead of pairs of the two halves
  double magnitude = 1.0;                ///< factor of cosines and sines (kYarn, kLongrope: attention_factor)
  double beta_fast = 32, beta_slow = 1;  ///< kYarn: blends between these numbers of turns in the original positions
  bool truncate = true;                  ///< kYarn: rounds that range to whole channels
  double mscale_all_dim = 0;  ///< enlarges the scores of latent attention where positions are stretched; 0: does not
  /// kLongrope, per pair: divisors of the frequencies up to the original positions, and beyond.
  std::vector<double> short_factor{}, long_factor{};

  /// True if the sequence length changes the frequencies of all positions.
  bool depends_on_length() const { return kind == Kind::kDynamic || kind == Kind::kLongrope; }
  bool operator==(const RotaryConfig&) const = default;
};

/// YaRN's factor for positions that are stretched by `factor` (transformers' get_mscale).
inline double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

/// Multiplies a query at position p by 1 + beta log(1 + floor((p + offset) / length)).
struct QueryTemperature {
  double beta = 0, length = 1;
  int64_t offset = 0;
  bool unrotated_only = false;  ///< spares the layers with rotation
  bool rounded = true;          ///< rounds the factor to the queries' dtype first
};

/// Class names that a family's modules report, for wrap policies.
struct ModuleNames {
  std::string norm, rotary, attention, mlp, layer, decoder, model;
  std::string moe{}, experts{}, router{};

  /// Returns the name of another class of the family, whose model is <family>ForCausalLM.
  std::string class_of(const std::string& kind) const { return model.substr(0, model.find("For")) + kind; }
};

/// GPT-OSS's gate: (up + 1) * gate * sigmoid(alpha * gate), with gate below `limit` and up within it.
struct ClampedGate {
  double alpha = 1.702, limit = 7;
};

/// How a router scores the experts, chooses the K of a token and weighs them.
struct RouterConfig {
  /// Turns an expert's logit into its score, in fp32. kLogit: the logit is the score, and the weights are the softmax
  /// over a token's experts.
  enum class Score { kSoftmax, kSigmoid, kLogit };
  std::string name = "gate";  ///< its module in the block
  Score score = Score::kSoftmax;
  bool bias = false;               ///< adds a bias to the logits
  bool in_fp32 = false;            ///< keeps the weight and computes the logits in fp32
  bool corrects_choice = false;    ///< adds a buffer e_score_correction_bias to the scores that choose
  bool normalise_weights = false;  ///< normalises a token's weights to sum 1
  double normalise_eps = 0;        ///< added to that sum
  double scale = 1;                ///< multiplies the weights
  /// A token chooses within the `chosen_groups` of `groups` equal runs of experts that have the largest scores.
  int64_t groups = 1, chosen_groups = 1;
  int64_t best_of_group = 2;       ///< a group's score is the sum of so many of its largest
  bool others_score_zero = false;  ///< gives experts outside the chosen groups the score 0 instead of -inf
  /// After every step the correction moves by it, against each expert's load (--moe-router-bias-update-rate). 0: never.
  double bias_update_rate = 0;
};

/// An MLP beside the experts, for all tokens.
struct SharedExpertConfig {
  int64_t intermediate_size = 0;  ///< 0: there is none
  bool gated = false;             ///< multiplies its output by sigmoid(shared_expert_gate(x))
  std::string name{};             ///< its module in the block: shared_expert, shared_experts
};

/// Layers with a mixture of experts instead of an MLP.
struct MoeConfig {
  int64_t num_experts = 0;  ///< 0: a dense network
  int64_t experts_per_token = 0;
  int64_t intermediate_size = 0;  ///< per expert
  int64_t latent_size = 0;        ///< channels of the latent that experts map to itself; 0: the hidden states
  RouterConfig router{};
  SharedExpertConfig shared{};
  bool bias = false;                     ///< gives the experts' projections biases
  std::optional<ClampedGate> clamped{};  ///< replaces an expert's activation
  double aux_loss_coef = 0;              ///< coefficient of transformers' load-balancing loss; 0: none
  double balance_coef = 0;               ///< coefficient of Megatron's, per layer; 0: none
  bool balances_sequences = false;  ///< balances each sequence (Megatron's seq_aux_loss) instead of each microbatch
  double z_loss_coef = 0;           ///< coefficient of Megatron's z-loss, per layer; 0: none
  int64_t sparse_step = 1;          ///< interval of layers with experts
  std::vector<int64_t> dense_layers{};

  bool weighs_inputs = false;  ///< multiplies an expert's input instead of its output by the token's weight

  bool has_megatron_losses() const { return balance_coef != 0 || z_loss_coef != 0; }
  bool is_sparse(int64_t layer) const {
    return num_experts > 0 && std::ranges::count(dense_layers, layer) == 0 && (layer + 1) % sparse_step == 0;
  }
};

/// Multi-latent attention. Of a head's query and key, `plain_dim` channels have no positions, and the config's head_dim
/// channels turn.
struct LatentConfig {
  int64_t query_rank = 0;  ///< channels of the queries' latent; 0: queries come from hidden states
  int64_t key_rank = 0;    ///< channels of the latent of keys and values
  int64_t plain_dim = 0;
  int64_t value_dim = 0;
  std::optional<double> norm_eps = 1e-6;  ///< epsilon of the latents' norms; unset: no norms
};

/// Layers that predict tokens beyond the next one (DeepSeek-V3's multi-token prediction).
struct PredictionConfig {
  int64_t depth = 0;        ///< number of these layers: layer k predicts the token k + 2 places on; 0: none
  double loss_scale = 0.1;  ///< coefficient of the mean of their losses
};

/// Heads of some layers that are others than the network's.
struct HeadSizes {
  int64_t head_dim = 0, num_kv_heads = 0;

  bool operator==(const HeadSizes&) const = default;
};

/// Gemma 4's embeddings of a token for each layer.
struct LayerInputConfig {
  int64_t size = 0;  ///< channels for a layer; 0: there are none
  int64_t vocab_size = 0;
};

/// A decoder-only network, independent of its source.
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
  bool norm_in_fp32 = false;        ///< multiplies by the weight before it rounds to the hidden states' dtype
  bool norm_bias = true;            ///< gives LayerNorms a bias
  bool zero_centered_norm = false;  ///< multiplies by 1 + weight (Gemma, --apply-layernorm-1p)
  bool sandwich_norms = false;      ///< also norms after attention and MLP (Gemma)
  bool post_norms = false;          ///< norms after attention and MLP alone (OLMo 2)
  bool parallel_branches = false;   ///< gives the MLP attention's normed input (Cohere)
  Activation activation = Activation::kSilu;
  bool gated_mlp = true;
  PositionKind positions = PositionKind::kRotary;
  RotaryConfig rotary{};
  /// Number of keys that a query sees in these layers, including its own; 0: all up to its own.
  int64_t sliding_window = 0;
  std::vector<int64_t> sliding_layers{};
  std::optional<RotaryConfig> sliding_rotary{};  ///< for these layers, if different
  std::vector<int64_t> unrotated_layers{};       ///< layers without positions
  /// Cuts documents into chunks of so many tokens for these layers, whose queries see keys of their chunk; 0: does not.
  int64_t attention_chunk = 0;
  std::vector<int64_t> chunked_layers{};
  std::optional<double> attention_scale{};  ///< factor of the query-key products; unset: 1 / sqrt(head_dim)
  double attention_softcap = 0;             ///< c: replaces a score by c tanh(score / c); 0: does not
  std::optional<QueryTemperature> temperature{};
  double embedding_scale = 1;  ///< rounded to the weight's dtype, as in transformers
  double residual_scale = 1;   ///< multiplies each branch's output
  double logit_scale = 1;
  double logit_softcap = 0;  ///< c: replaces a logit by c tanh(logit / c); 0: does not
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool mlp_bias = false;
  std::optional<LatentConfig> latent{};
  std::optional<HeadSizes> global_heads{};  ///< replaces heads in layers without a window
  bool values_are_keys = false;             ///< layers without a window: values are keys before their norm and rotation
  bool v_norm = false;                      ///< norms each head of values, without a weight
  /// So many last layers attend to the keys and values of the last layer before them with, or without, a window.
  int64_t shared_kv_layers = 0;
  bool layer_scalars = false;  ///< multiplies a layer's output by a buffer
  LayerInputConfig layer_inputs{};
  bool attention_gate = false;           ///< multiplies attention's output by sigmoid of further rows of q_proj
  bool attention_sinks = false;          ///< gives each head a parameter: the score of a key without a value
  bool qk_norm = false;                  ///< norms each head of queries and keys
  bool qk_norm_of_all_heads = false;     ///< norms all heads of queries together, and those of keys
  bool qk_norm_behind_rotation = false;  ///< norms rotated queries and keys
  bool qk_norm_weight = true;            ///< false: norms queries and keys without parameters
  bool tie_word_embeddings = false;
  bool score_head = false;  ///< `score` [1, hidden] takes the place of lm_head (transformers' ...Classification)
  double attention_dropout = 0;
  double hidden_dropout = 0;
  double init_std = 0.02;
  double output_init_scale = 1;  ///< factor of init_std for projections at the end of a residual branch
  std::optional<int64_t> pad_token_id{};
  MoeConfig moe{};
  PredictionConfig prediction{};

  bool is_chunked(int64_t layer) const { return attention_chunk > 0 && std::ranges::count(chunked_layers, layer) > 0; }
  bool takes_keys(int64_t layer) const { return layer >= num_layers - shared_kv_layers; }
  /// The layer whose keys and values a layer takes; -1: there is none.
  int64_t giver_of_keys(int64_t layer) const {
    int64_t giver = num_layers - shared_kv_layers - 1;
    while (giver >= 0 && is_sliding(giver) != is_sliding(layer)) --giver;
    return giver;
  }
  bool gives_keys(int64_t layer) const { return shared_kv_layers > 0 && giver_of_keys(layer) == layer; }
  bool is_sliding(int64_t layer) const { return sliding_window > 0 && std::ranges::count(sliding_layers, layer) > 0; }
  /// True if the layer multiplies its queries by factors of the temperature.
  bool has_query_factors(int64_t layer) const {
    return temperature && !(temperature->unrotated_only && is_rotated(layer));
  }
  bool is_rotated(int64_t layer) const {
    return positions == PositionKind::kRotary && std::ranges::count(unrotated_layers, layer) == 0;
  }
};

}  // namespace megashard
