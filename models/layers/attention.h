#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/layers/part.h"
#include "models/layers/pass.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Causal self-attention with grouped queries.
struct AttentionSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  ///< a divisor of num_heads
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool out_bias = false;
  /// q_proj has for each head its queries, then a gate: out * sigmoid(gate).
  bool output_gate = false;
  std::optional<NormSpec> head_norm{};  ///< of each head of queries and keys, before the rotation
  bool norms_rotated = false;           ///< norms rotated heads instead
  bool norms_all_heads = false;         ///< head_norm norms all heads together instead
  std::optional<size_t> rotary{};       ///< tables of the rotation: an index into Pass::rotary; unset: no rotation
  bool rotary_interleaved = false;
  bool sinks = false;             ///< gives each head a parameter: the score of a key without a value
  int64_t window = 0;             ///< number of keys that a query sees, including its own; 0: all up to its own
  int64_t chunk = 0;              ///< limits a query to its piece of Pass::chunks, of so many tokens; 0: does not
  bool query_factors = false;     ///< multiplies queries by Pass::query_factors
  std::optional<double> scale{};  ///< multiplies the scores; unset: 1 / sqrt(head_dim)
  double softcap = 0;             ///< c: replaces a score by c tanh(score / c); 0: does not
  double dropout = 0;             ///< drops attention weights at this rate in training
  double output_init_scale = 1;   ///< factor of the initialisation's std for o_proj
  bool values_are_keys = false;   ///< without v_proj: values are keys before their norm and rotation
  bool norms_values = false;      ///< norms each head of values, without a weight; needs head_norm
  /// kGive: later layers take its keys and values; kTake: has none, and takes those of a layer before.
  enum class Sharing { kNone, kGive, kTake };
  Sharing sharing = Sharing::kNone;
  size_t shared_place = 0;  ///< index in Pass::shared_keys
};

PartSpecPtr attention_part(AttentionSpec spec);

struct CachedKeys;

/// Attention without parameters, as a module that can be recomputed or offloaded (Megatron's core_attention).
class CoreAttention : public torch::nn::Module {
 public:
  CoreAttention(double dropout, std::optional<double> scale, double softcap = 0)
      : dropout_(dropout), scale_(scale), softcap_(softcap) {}

  /// q [B, T, H, D], k [B, T, G, D], v [B, T, G, V] with V <= D -> [B, T, H, V]. With a ring the T rows are this
  /// rank's, and keys of the other ranks are received here.
  /// `sinks` [H]: see AttentionSpec; undefined: none.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                     const at::Tensor& sinks);
  /// The same for q [B, T, H, D] of later tokens than those of the keys before them, on this rank alone.
  at::Tensor forward_cached(const at::Tensor& q, const CachedKeys& keys, const at::Tensor& sinks) const;

 private:
  double dropout_;
  std::optional<double> scale_;
  double softcap_;
};

/// Modules q_proj, k_proj, v_proj, o_proj, q_norm and k_norm if there are norms of heads, and core_attention:
/// causal_attention or ring_attention. Key and value heads are not expanded. A layer that takes keys has only q_proj,
/// q_norm and o_proj.
class Attention : public torch::nn::Module, public SelfInitializing, public CutOverRanks {
 public:
  Attention(const AttentionSpec& spec, const BuildContext& context);

  LayerOutput forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C]
  void init_own_weights(const WeightInit& init) override;
  void declare_cut(const DeviceMeshPtr& mesh) override;
  std::string class_name() const { return class_name_; }

 private:
  /// Splits q_proj's output [B, T, rows] into queries and gates [B, T, heads, head_dim].
  std::pair<at::Tensor, at::Tensor> queries_and_gates(const at::Tensor& projected) const;
  /// Queries, keys and values [B, T, heads, head_dim] from the projections, after norm and rotary embedding.
  std::vector<at::Tensor> heads_of(const std::vector<at::Tensor>& projected, const RotaryTables& rotary) const;
  /// The same without what follows the rotation.
  std::vector<at::Tensor> turned_heads(const std::vector<at::Tensor>& projected, const RotaryTables& rotary) const;
  /// Queries of a layer that takes keys.
  at::Tensor turned_queries(const at::Tensor& projected, const RotaryTables& rotary) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  int64_t num_heads_;  // of this rank, as num_kv_heads_
  int64_t num_kv_heads_;
  int64_t head_dim_;
  std::optional<size_t> rotary_;
  bool rotary_interleaved_, norms_all_heads_, norms_rotated_, output_gate_;
  int64_t window_;
  int64_t chunk_;
  bool query_factors_, values_are_keys_;
  AttentionSpec::Sharing sharing_;
  size_t shared_place_;
  JointLinears projections_;  // q_proj, k_proj, v_proj
  std::shared_ptr<Hooked<RowParallelLinear>> o_proj_;
  std::shared_ptr<Hooked<Norm>> q_norm_, k_norm_, v_norm_;
  std::shared_ptr<Hooked<CoreAttention>> core_attention_;
  at::Tensor sinks_;  // [heads of this rank]; undefined: none
};

/// q [B, T, H, D] times Pass::query_factors, rounded to q's dtype.
at::Tensor scale_queries(const at::Tensor& q, const at::Tensor& factors);

/// Throws if `dropout` of attention weights is not 0: rings have none.
void require_no_dropout_in_ring(const std::string& model, double dropout);

/// Reorders the first `dims` channels of x [B, T, heads, D], even ones before odd ones, so that pairs of neighbours
/// become pairs of halves. Queries and keys are permuted equally, so their products are unchanged.
at::Tensor neighbours_to_halves(const at::Tensor& x, int64_t dims);

}  // namespace megashard
