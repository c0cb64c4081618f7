#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Ulysses sequence parallelism (DeepSpeed; ulysses_cp_algo of transformers and MindSpeed): outside of attention a rank
/// has some rows of all heads, inside it all rows of some heads. Two all-to-alls switch between them; each is the
/// other's backward.
///
/// rows[i] [B, rows(), H_i, D] -> [B, length, H_i / ranks, D], views of one buffer. One all-to-all for all; every H_i
/// is a multiple of the ranks. Collective over the shard's group. The shard has no ring: for a sequence in a ring pass
/// the place's shard (SequenceShard::of_place).
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& rows, const SequenceShard& shard);
/// The inverse: [B, length, h, D] -> [B, rows(), h * ranks, D].
at::Tensor scatter_sequence(const at::Tensor& heads, const SequenceShard& shard);

/// Repeats key or value heads [B, T, G, D] so that each of `ranks` gets one: ranks that share a head get equal copies.
/// Returns them unchanged if G is a multiple of the ranks.
at::Tensor spread_heads(const at::Tensor& heads, int64_t ranks);

/// Throws if the heads cannot be split over `ranks`; the message begins with `model`.
void check_ulysses_heads(const std::string& model, int64_t heads, int64_t kv_heads, int64_t ranks);

}  // namespace megashard
