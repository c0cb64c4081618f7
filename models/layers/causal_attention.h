#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "models/layers/pass.h"

namespace megashard {

/// Keys that a query sees: from `key_begins` on, within the window, and up to its own, or to `key_ends`.
struct KeyRange {
  at::Tensor key_begins{};  ///< [B, T] int64, non-decreasing in a row; undefined: 0
  at::Tensor key_ends{};    ///< [B, T] int64, non-decreasing in a row: behind the last key; undefined: its own + 1
  int64_t window = 0;       ///< its own key and the window - 1 before it; 0: all
};

/// True if fused_attention() supports such queries: CPU, fp32, bf16, fp16, unless MEGASHARD_CPU_ATTENTION is libtorch.
bool has_fused_attention(const at::Tensor& q);

/// softmax(scale q k^T) v over the keys that each query sees, with attention_kernels.h: scores are not stored, and
/// blocks of unseen keys are skipped. q [B, T, H, D], k and v [B, T, G, D], G a divisor of H, any strides; returns [B,
/// T, H, D], contiguous. `sinks` [H] or undefined. First derivatives only.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeyRange& range,
                           double scale, const at::Tensor& sinks = {});

struct AttentionOptions {
  double dropout = 0;             ///< drops attention weights at this rate
  std::optional<double> scale{};  ///< multiplies the scores; unset: 1 / sqrt(D)
  double softcap = 0;             ///< c: replaces a score by c tanh(score / c) (capped_attention); 0: does not
  at::Tensor sinks{};             ///< [H]: scores of a key without a value, for each head; undefined: none
};

/// Attention over the keys that each query sees according to `span`, for sequences that are not sharded. q [B, T, H,
/// D], k and v [B, T, G, D], G a divisor of H -> [B, T, H, D]. Uses fused_attention() on CPUs, and one call of
/// LibTorch's flash attention on GPUs for fp16 or bf16. Otherwise, and with dropout, calls scaled_dot_product_attention
/// for each document, and for each part of a document longer than the window, so that masks are no larger than such a
/// part and its keys; so do GPUs with sinks.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options);

}  // namespace megashard
