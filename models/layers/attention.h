#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/layers/joint_linears.h"
#include "models/layers/key_span.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/layers/rotary.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Inputs shared by all layers of a forward, or by all sliding layers.
struct LayerContext {
  RotaryTables rotary;
  at::Tensor token_mask{};  // see Batch
  KeySpan span{};

  template <class F>
  void visit_tensors(F&& f) {
    rotary.visit_tensors(f);
    f(token_mask);
  }
};

/// Attention without parameters, as a module that can be recomputed or offloaded (Megatron's core_attention).
class CoreAttention : public torch::nn::Module {
 public:
  explicit CoreAttention(const DecoderConfig& config)
      : dropout_(config.attention_dropout), scale_(config.attention_scale) {}

  /// q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D]. With a ring the T rows are this rank's, and keys of the
  /// other ranks are received here.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span);

 private:
  double dropout_;
  std::optional<double> scale_;
};

/// Causal self-attention with grouped queries: q_proj, k_proj, v_proj, o_proj, q_norm and k_norm over each head if the
/// family has them, and core_attention: causal_attention or ring_attention. Key and value heads are not expanded.
class Attention : public torch::nn::Module {
 public:
  explicit Attention(const DecoderConfig& config);

  at::Tensor forward(const at::Tensor& hidden,
                     const LayerContext& context);  // [B, T, C] -> [B, T, C]
  std::string class_name() const { return class_name_; }

 private:
  /// Queries, keys and values [B, T, heads, head_dim] from the projections, after norm and rotary embedding.
  std::vector<at::Tensor> heads_of(const std::vector<at::Tensor>& projected, const RotaryTables& rotary) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  int64_t num_heads_;  // of this rank, as num_kv_heads_
  int64_t num_kv_heads_;
  int64_t head_dim_;
  bool rotary_interleaved_;
  JointLinears projections_;  // q_proj, k_proj, v_proj
  std::shared_ptr<Hooked<Linear>> o_proj_;
  std::shared_ptr<Hooked<Norm>> q_norm_, k_norm_;
  std::shared_ptr<Hooked<CoreAttention>> core_attention_;
};

}  // namespace megashard
