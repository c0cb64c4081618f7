#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Ulysses sequence parallelism (DeepSpeed; transformers' and MindSpeed's ulysses_cp_algo): outside
/// of attention a rank has some rows with all heads, inside all rows with some heads. Two
/// all-to-all exchanges lie between; each one's backward is the other.
///
/// rows[i] [B, rows(), H_i, D] -> [B, length, H_i / ranks, D], views of one buffer. One exchange
/// for all of them; every H_i is a multiple of the ranks. Collective over the shard's group. The
/// shard has no ring: of a sequence in a ring it is that of a place (SequenceShard::of_place).
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& rows, const SequenceShard& shard);
/// The inverse: [B, length, h, D] -> [B, rows(), h * ranks, D].
at::Tensor scatter_sequence(const at::Tensor& heads, const SequenceShard& shard);

/// Key or value heads [B, T, G, D], each repeated as often as `ranks` need to have one of their
/// own: the ranks that share a head get equal ones. Where G is a multiple of the ranks, as they
/// are.
at::Tensor spread_heads(const at::Tensor& heads, int64_t ranks);

/// The message about heads that cannot be spread over so many ranks; `model` begins it.
void check_ulysses_heads(const std::string& model, int64_t heads, int64_t kv_heads, int64_t ranks);

}  // namespace megashard
