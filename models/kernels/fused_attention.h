#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// Which keys a query sees: of those up to its own, the ones from `key_begins` on that are within the window.
struct KeyRange {
  at::Tensor key_begins{};  ///< [B, T] int64, rising in a row; undefined: 0
  int64_t window = 0;       ///< its own key and the window - 1 before it; 0: all
};

/// Whether fused_attention() takes such queries: CPU, fp32, bf16, fp16; none if MEGASHARD_CPU_ATTENTION is libtorch.
bool has_fused_attention(const at::Tensor& q);

/// softmax(scale q k^T) v over the keys that each query sees, by attention_kernels.h: no scores are kept, and blocks of
/// keys that no query sees cost nothing. q [B, T, H, D], k and v [B, T, G, D], G a divisor of H, any strides; returns
/// [B, T, H, D], dense. First derivatives only.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeyRange& range,
                           double scale);

}  // namespace megashard
