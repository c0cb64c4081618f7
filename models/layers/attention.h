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

/// What all layers of a forward share, or all sliding ones.
struct LayerContext {
  RotaryTables rotary;
  at::Tensor token_mask{};  // as Batch's
  KeySpan span{};

  template <class F>
  void visit_tensors(F&& f) {
    rotary.visit_tensors(f);
    f(token_mask);
  }
};

/// The part of attention without parameters, a module so that it can be recomputed or offloaded by
/// itself (Megatron's core_attention).
class CoreAttention : public torch::nn::Module {
 public:
  explicit CoreAttention(const DecoderConfig& config)
      : dropout_(config.attention_dropout), scale_(config.attention_scale) {}

  /// q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D]. Of a sequence in a ring the T rows are those of this
  /// rank's place, and keys of the others come by in here.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span);

 private:
  double dropout_;
  std::optional<double> scale_;
};

/// Causal self-attention with grouped queries: q_proj, k_proj, v_proj, o_proj, and q_norm, k_norm
/// over each head where the family has them, and core_attention: causal_attention, or
/// ring_attention; key and value heads are not expanded.
class Attention : public torch::nn::Module {
 public:
  explicit Attention(const DecoderConfig& config);

  at::Tensor forward(const at::Tensor& hidden,
                     const LayerContext& context);  // [B, T, C] -> [B, T, C]
  std::string class_name() const { return class_name_; }

 private:
  /// Of what the projections gave, queries, keys and values [B, T, heads, head_dim], normed and turned.
  std::vector<at::Tensor> heads_of(const std::vector<at::Tensor>& projected, const RotaryTables& rotary) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  int64_t num_heads_;  // this rank's, as num_kv_heads_
  int64_t num_kv_heads_;
  int64_t head_dim_;
  bool rotary_interleaved_;
  JointLinears projections_;  // q_proj, k_proj, v_proj
  std::shared_ptr<Hooked<Linear>> o_proj_;
  std::shared_ptr<Hooked<Norm>> q_norm_, k_norm_;
  std::shared_ptr<Hooked<CoreAttention>> core_attention_;
};

}  // namespace megashard
