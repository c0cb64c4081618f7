#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "models/layers/attention.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/layers/part.h"
#include "models/layers/pass.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Causal self-attention whose queries, keys and values come from normed latents (DeepSeek's multi-latent attention).
/// Of a head's query and key, `plain_dim` channels have no positions and `rotated_dim` channels turn; the latter are
/// one key for all heads.
struct LatentAttentionSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t query_rank = 0;  ///< channels of the queries' latent; 0: queries come from hidden states
  int64_t key_rank = 0;    ///< channels of the latent of keys and values
  int64_t plain_dim = 0, rotated_dim = 0;
  int64_t value_dim = 0;
  bool latent_bias = false;         ///< gives the projections from hidden states to latents biases
  bool out_bias = false;            ///< gives o_proj a bias
  std::optional<NormSpec> norm{};   ///< norms the latents; its width is a latent's
  std::optional<size_t> rotary{0};  ///< tables of the rotation: an index into Pass::rotary; unset: no rotation
  bool neighbours = true;           ///< rotates pairs of neighbours instead of pairs of the two halves
  bool query_factors = false;       ///< multiplies queries by Pass::query_factors
  double scale = 1;                 ///< multiplies the scores
  double dropout = 0;               ///< drops attention weights in training
  double output_init_scale = 1;     ///< factor of the initialisation's std for o_proj

  int64_t key_dim() const { return plain_dim + rotated_dim; }
};

PartSpecPtr latent_attention_part(LatentAttentionSpec spec);

/// Modules q_a_proj, q_a_layernorm and q_b_proj (or q_proj), kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj, and
/// core_attention.
class LatentAttention : public torch::nn::Module {
 public:
  LatentAttention(const LatentAttentionSpec& spec, const BuildContext& context);

  at::Tensor forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C] -> [B, T, C]
  std::string class_name() const { return spec_.class_name; }

 private:
  at::Tensor query_latent(const at::Tensor& own) const;
  /// Queries, keys and values [B, T, heads of this rank, channels].
  std::vector<at::Tensor> heads_of(const at::Tensor& own, const RotaryTables& rotary) const;

  LatentAttentionSpec spec_;
  TensorParallelRanksPtr ranks_;
  int64_t num_heads_;  // of this rank
  std::shared_ptr<Hooked<ReplicatedLinear>> q_a_proj_, kv_a_proj_;
  std::shared_ptr<Hooked<Norm>> q_a_layernorm_, kv_a_layernorm_;      // null: none
  std::shared_ptr<Hooked<ColumnParallelLinear>> q_proj_, kv_b_proj_;  // q_proj_: q_b_proj if there is a latent
  std::shared_ptr<Hooked<RowParallelLinear>> o_proj_;
  std::shared_ptr<Hooked<CoreAttention>> core_attention_;
};

}  // namespace megashard
