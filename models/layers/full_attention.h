#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// softmax(q k^T / sqrt(D)) v over all keys: q [B, T, H, D], k and v [B, S, H, D] -> [B, T, H, D]. `key_mask` [B, S]
/// bool: false for padding, which is no key; undefined: there is none.
at::Tensor full_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& key_mask = {});

/// Attention of a sequence to itself that is not causal. q, k and v [B, rows, H, D]: the rows of `sequence` on this
/// rank, which are exchanged for heads (Ulysses), travel in a ring, or both. `key_mask` [B, length] bool, the same on
/// all ranks: false for padding, which is no key; undefined: there is none. Collective over the ranks that share the
/// sequence.
at::Tensor full_self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& key_mask, const SequenceShard& sequence);

}  // namespace megashard
