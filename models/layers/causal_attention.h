#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Packed documents in the rows of a batch; attention does not cross them.
struct Documents {
  std::vector<int64_t> lengths;  ///< of all rows, concatenated; each row starts a document
  int64_t longest = 0;           ///< maximum of the lengths
  at::Tensor ends;               ///< without ring on GPUs: [documents + 1] int32: 0, then the end of each in all rows
  at::Tensor begins;             ///< with a ring and on CPUs: [B, T] int64, the start of a token's document in its row

  /// From Batch::document_lengths, for `rows` rows of `length` tokens, which a ring shards. Does not block the host.
  /// Null without lengths; throws if they do not add up to the rows.
  static std::shared_ptr<const Documents> of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                             c10::Device device);
};

/// Keys that a layer's queries see: up to their own, of their document, within the window.
struct KeySpan {
  SequenceShard sequence{};                      // positions of the rows of [B, T]
  std::shared_ptr<const Documents> documents{};  // null: one per row
  int64_t window = 0;                            // number of keys including the query's own; 0: all
};

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
