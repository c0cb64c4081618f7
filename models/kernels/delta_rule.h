#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Inputs of the gated delta rule, fp32; Hv a multiple of Hk: value head h reads key head h / (Hv / Hk).
struct DeltaRuleInputs {
  at::Tensor q, k;    ///< [B, T, Hk, Dk], scaled to length 1 here
  at::Tensor v;       ///< [B, T, Hv, Dv]
  at::Tensor decay;   ///< [B, T, Hv], or of each key channel [B, T, Hv, Dk]: logarithm of the factor of the state, <= 0
  at::Tensor beta;    ///< [B, T, Hv]: part of the value that is written
  at::Tensor begins;  ///< [B, T] int64: first token of a token's document; undefined: 0
};

/// The gated delta rule (transformers' chunk_gated_delta_rule; with a decay of each channel
/// chunk_kimi_delta_attention). Each head has a state S [Dk, Dv], zero before a document; a token does S <- e^decay S,
/// S <- S + k (beta (v - S^T k))^T, and its result is S^T q / sqrt(Dk). Returns [B, T, Hv, Dv]. Computed in chunks of
/// tokens, whose matrices hold the products of their keys.
at::Tensor gated_delta_rule(const DeltaRuleInputs& x);

}  // namespace megashard
