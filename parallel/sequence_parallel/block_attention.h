#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// Keys of a block that each of its queries attends to.
struct BlockMask {
  bool causal = false;   ///< query i attends to keys up to i; needs as many keys as queries
  at::Tensor allowed{};  ///< [B or 1, 1, queries or 1, keys] bool; undefined: all, or `causal`
};

/// True if CUDA's flash attention supports such queries.
bool has_flash_kernel(const at::Tensor& q);
/// Channels to pad a head by for CUDA's kernels, which need multiples of 8.
inline int64_t missing_channels(int64_t width) { return (8 - width % 8) % 8; }

/// Attention over some of a query's keys, with the log-sum-exp of their scores, which merging with other parts needs.
struct BlockAttention {
  at::Tensor out;  ///< [B, H, queries, D] in the queries' dtype; 0 for a query without keys
  at::Tensor lse;  ///< [B, H, queries] in accumulated_dtype(); kNoKey for a query without keys
};

/// Log-sum-exp of no scores: low enough to get no weight in a merge, finite so that differences are never NaN.
inline constexpr double kNoKey = -1e30;

/// fp32; fp64 for fp64 input.
at::ScalarType accumulated_dtype(const at::Tensor& x);

/// q [B, H, queries, D], k and v [B, G, keys, D], G a divisor of H; any strides. Uses LibTorch's fused kernels: flash
/// attention on CPUs, and on GPUs for 16-bit floats without `allowed`; else memory-efficient attention, for which key
/// heads are repeated. Keeps no scores. Without autograd.
BlockAttention attend_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale);

struct BlockGradients {
  at::Tensor q, k, v;  ///< same shapes as the inputs
};

/// Gradients of this block's share in the complete attention; `whole` has its output and the log-sum-exp over all keys
/// of these queries.
BlockGradients attend_block_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const BlockAttention& whole, const BlockMask& mask,
                                     double scale);

}  // namespace megashard
