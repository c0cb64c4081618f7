#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// Which keys of a block each of its queries sees.
struct BlockMask {
  bool causal = false;   ///< query i sees the keys up to i; as many keys as queries
  at::Tensor allowed{};  ///< [B or 1, 1, queries, keys] bool; undefined: all, or as `causal` says
};

/// Whether CUDA's flash attention takes such queries.
bool has_flash_kernel(const at::Tensor& q);
/// By how many channels a head must be wider for CUDA's kernels, which take multiples of 8.
inline int64_t missing_channels(int64_t width) { return (8 - width % 8) % 8; }

/// Attention of queries over a part of their keys, and the log-sum-exp of their scores there: what is
/// needed to merge it with other parts.
struct BlockAttention {
  at::Tensor out;  ///< [B, H, queries, D] in the queries' dtype; 0 where a query sees no key
  at::Tensor lse;  ///< [B, H, queries] in accumulated_dtype(); kNoKey there
};

/// The log-sum-exp of no score at all: so low that a merge gives it no weight, and finite, so that
/// differences of two are no NaN.
inline constexpr double kNoKey = -1e30;

/// fp32, or fp64 of that.
at::ScalarType accumulated_dtype(const at::Tensor& x);

/// q [B, H, queries, D], k and v [B, G, keys, D], G a divisor of H; any strides. LibTorch's fused
/// kernels: flash attention on CPUs, and on GPUs of 16-bit floats without `allowed`; else
/// memory-efficient attention, which has key heads repeated. No scores are kept. Without autograd.
BlockAttention attend_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale);

struct BlockGradients {
  at::Tensor q, k, v;  ///< as these
};

/// Of the block's share in a whole attention, whose result and log-sum-exp over all keys of these
/// queries `whole` has.
BlockGradients attend_block_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const BlockAttention& whole, const BlockMask& mask,
                                     double scale);

}  // namespace megashard
