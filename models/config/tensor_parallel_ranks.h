#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// The ranks that share the layers of a model among them (--tensor-model-parallel-size): each has a
/// piece of every weight that is cut, and copies of the others. Its modules ask one such object, and
/// are made before the ranks have a group. With one rank all of these functions return their input.
class TensorParallelRanks {
 public:
  TensorParallelRanks() = default;
  TensorParallelRanks(int64_t size, int64_t rank, bool sequence_parallel);

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }
  /// Between the layers that are cut, a rank has its rows [B, T / size, C] of a sequence.
  bool sequence_parallel() const { return sequence_parallel_; }
  /// Before the first forward.
  void set_group(ProcessGroupPtr group);
  const ProcessGroupPtr& group() const;  ///< throws where there is none yet

  // Around layers of pieces, column-parallel at first, row-parallel at last.
  /// Hidden states [B, T, C], or this rank's rows -> [B, T, C] for a column-parallel layer.
  at::Tensor enter(const at::Tensor& hidden) const;
  /// A row-parallel layer's part of the sums [B, T, C] -> hidden states, or this rank's rows.
  at::Tensor leave(const at::Tensor& partial) const;

  // Around layers that all ranks compute alike, on whole sequences.
  at::Tensor whole_sequence(const at::Tensor& hidden) const;
  at::Tensor own_rows(const at::Tensor& whole) const;

  /// Each rank's part of the sums [N, C] -> the sums; and back, in backward.
  at::Tensor sum(const at::Tensor& partial) const;
  /// A tensor that all ranks have and each uses for its part: gradients are added up.
  at::Tensor with_summed_gradient(const at::Tensor& shared) const;
  /// The same of a weight that is used on hidden states: only with sequence parallelism ranks see
  /// other rows.
  at::Tensor for_own_rows(const at::Tensor& weight) const;

 private:
  int64_t size_ = 1, rank_ = 0;
  bool sequence_parallel_ = false;
  ProcessGroupPtr group_;
};

using TensorParallelRanksPtr = std::shared_ptr<TensorParallelRanks>;

}  // namespace megashard
