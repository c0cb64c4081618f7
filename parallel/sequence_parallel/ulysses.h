#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// A sequence whose rows lie on the ranks of a group, in rank order: ceil(length / ranks) each, on
/// the last ranks fewer, or none.
struct SequenceShard {
  ProcessGroupPtr group{};  ///< null: this rank has the whole sequence
  int64_t length = 0;       ///< of the whole sequence

  bool is_whole() const { return group == nullptr || group->size() == 1; }
  int64_t most_rows() const;  ///< of any rank
  int64_t rows() const;       ///< of this rank
  /// This rank's rows of dimension `dim`, a view; a whole sequence is returned as it is.
  at::Tensor rows_of(const at::Tensor& whole, int64_t dim) const;
};

/// Ulysses sequence parallelism (DeepSpeed; transformers' and MindSpeed's ulysses_cp_algo): outside
/// of attention a rank has some rows with all heads, inside all rows with some heads. Two
/// all-to-all exchanges lie between; each one's backward is the other.
///
/// rows[i] [B, rows(), H_i, D] -> [B, length, H_i / ranks, D], views of one buffer. One exchange
/// for all of them; every H_i is a multiple of the ranks. Collective over the shard's group.
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& rows, const SequenceShard& shard);
/// The inverse: [B, length, h, D] -> [B, rows(), h * ranks, D].
at::Tensor scatter_sequence(const at::Tensor& heads, const SequenceShard& shard);

/// The sum of a tensor over the shard's ranks, each of which uses it; so is its gradient.
at::Tensor sum_over_sequence(const at::Tensor& mine, const SequenceShard& shard);

/// Key or value heads [B, T, G, D], each repeated as often as `ranks` need to have one of their
/// own: the ranks that share a head get equal ones. Where G is a multiple of the ranks, as they
/// are.
at::Tensor spread_heads(const at::Tensor& heads, int64_t ranks);

/// The message about heads that cannot be spread over so many ranks; `model` begins it.
void check_ulysses_heads(const std::string& model, int64_t heads, int64_t kv_heads, int64_t ranks);

}  // namespace megashard
