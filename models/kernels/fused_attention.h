#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// Keys that a query sees: up to its own, from `key_begins` on, and within the window.
struct KeyRange {
  at::Tensor key_begins{};  ///< [B, T] int64, non-decreasing in a row; undefined: 0
  int64_t window = 0;       ///< its own key and the window - 1 before it; 0: all
};

/// True if fused_attention() supports such queries: CPU, fp32, bf16, fp16, unless MEGASHARD_CPU_ATTENTION is libtorch.
bool has_fused_attention(const at::Tensor& q);

/// softmax(scale q k^T) v over the keys that each query sees, with attention_kernels.h: scores are not stored, and
/// blocks of unseen keys are skipped. q [B, T, H, D], k and v [B, T, G, D], G a divisor of H, any strides; returns [B,
/// T, H, D], contiguous. First derivatives only.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeyRange& range,
                           double scale);

}  // namespace megashard
