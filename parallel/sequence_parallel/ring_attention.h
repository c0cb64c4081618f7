#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// What limits the keys that a query sees; those behind it are never seen.
struct RingMask {
  at::Tensor document_begins{};  ///< [B or 1, length] int64: a query's first key; undefined: that of the sequence
  int64_t window = 0;            ///< a query's own key and the window - 1 before it; 0: all
};

/// Causal attention of a sequence in a ring (Megatron's p2p, MindSpeed's megatron_cp_algo): keys and
/// values travel from place to place, the next ones while those at hand are used, and what a query
/// has of each place is merged by the log-sum-exp of its scores, in fp32. In backward keys and values
/// travel again, and their gradients, in fp32, with them. A rank never has more than two places'
/// keys, and scores of no query.
///
/// q [B, rows, H, D], k and v [B, rows, G, D], G a divisor of H: the place's rows, of all heads that
/// this rank has -> [B, rows, H, D]. First derivatives only. Collective over the ring.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const RingMask& mask,
                          std::optional<double> scale, const SequenceShard& shard);

}  // namespace megashard
