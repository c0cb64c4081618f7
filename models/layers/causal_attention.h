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
/// [B, T, G, D], G a divisor of H -> [B, T, H, D]. A document is a scaled_dot_product_attention of its own, and so is
/// each part of one that is longer than the window, so that no mask is larger than such a part and its keys. GPUs take
/// all in one call where fp16 or bf16 allow it.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options);

}  // namespace megashard
