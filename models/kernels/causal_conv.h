#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Causal convolution of each channel over the last K tokens: y_t = sum_j weight[c, j] x_(t - K + 1 + j), for x [B, T,
/// C] and weight [C, K]. `begins` [B, T] int64: the first token of a token's document, before which x counts as zero;
/// undefined: 0. First derivatives only.
at::Tensor causal_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& begins);

}  // namespace megashard
