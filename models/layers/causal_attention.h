#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "models/layers/key_span.h"

namespace megashard {

struct AttentionOptions {
  double dropout = 0;             ///< of attention weights
  std::optional<double> scale{};  ///< of the scores; unset: 1 / sqrt(D)
};

/// Attention over the keys that each query sees according to `span`, for sequences that are not sharded. q [B, T, H,
/// D], k and v [B, T, G, D], G a divisor of H -> [B, T, H, D]. Uses fused_attention() on CPUs, and one call of
/// LibTorch's flash attention on GPUs for fp16 or bf16. Otherwise, and with dropout, calls scaled_dot_product_attention
/// for each document, and for each part of a document longer than the window, so that masks are no larger than such a
/// part and its keys.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options);

}  // namespace megashard
