#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "models/layers/key_span.h"

namespace megashard {

struct AttentionOptions {
  double dropout = 0;             ///< of attention weights
  std::optional<double> scale{};  ///< of the scores; unset: 1 / sqrt(D)
};

/// Attention over the keys that `span` lets each query see, of sequences that are whole here. q [B, T, H, D], k and v
/// [B, T, G, D], G a divisor of H -> [B, T, H, D]. On CPUs fused_attention(), on GPUs one call of LibTorch's flash
/// attention where fp16 or bf16 allow it. Else, and with dropout, a document is a scaled_dot_product_attention of its
/// own, and so is each part of one that is longer than the window: no mask is larger than such a part and its keys.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options);

}  // namespace megashard
