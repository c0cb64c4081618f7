#pragma once

#include <ATen/core/Tensor.h>

#include "models/layers/causal_attention.h"

namespace megashard {

/// causal_attention() with soft-capped scores, c tanh(score / c) of the option softcap. Computes at most 256 queries at
/// a time with the keys that they see, in backward again, so that only q, k and v are kept; with dropout LibTorch keeps
/// the weights. First derivatives only.
at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options);

}  // namespace megashard
