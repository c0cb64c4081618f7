#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Limits on the keys that a query attends to.
struct RingMask {
  at::Tensor document_begins{};  ///< [B or 1, length] int64: a query's first key; undefined: the sequence's first
  int64_t window = 0;            ///< own key and the window - 1 keys before it; 0: unlimited
  bool causal = true;            ///< false: a query attends to all keys, without documents and window
  at::Tensor keys{};             ///< not causal: [B or 1, length] bool, false for keys of no query; undefined: all
};

/// Attention of a sequence in a ring (Megatron's p2p, MindSpeed's megatron_cp_algo). Keys and values travel from
/// place to place, the next ones while the current ones are used; each query's partial results are merged by the
/// log-sum-exp of their scores, in fp32. In backward, keys and values travel again together with their fp32 gradients.
/// A rank holds at most two places' keys at a time and no scores.
///
/// q [B, rows, H, D], k and v [B, rows, G, D], G a divisor of H: the place's rows of all heads on this rank -> [B,
/// rows, H, D]. First derivatives only. Collective over the ring.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const RingMask& mask,
                          std::optional<double> scale, const SequenceShard& shard);

}  // namespace megashard
