#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Tensor parallelism of a model (--tensor-model-parallel-size): each rank has a shard of every sharded weight and
/// copies of the others. Modules share one such object and are created before the group exists. With one rank all
/// functions return their input.
class TensorParallelRanks {
 public:
  TensorParallelRanks() = default;
  TensorParallelRanks(int64_t size, int64_t rank, bool sequence_parallel);

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }
  /// Outside tensor-parallel layers a rank has the rows [B, T / size, C] of a sequence.
  bool sequence_parallel() const { return sequence_parallel_; }
  /// Call it before the first forward.
  void set_group(ProcessGroupPtr group);
  const ProcessGroupPtr& group() const;  ///< throws if set_group was not called

  // For tensor-parallel blocks, from a column-parallel to a row-parallel layer.
  /// Hidden states [B, T, C], or this rank's rows -> [B, T, C], the input of a column-parallel layer.
  at::Tensor enter(const at::Tensor& hidden) const;
  /// Partial sums [B, T, C] of a row-parallel layer -> hidden states, or this rank's rows.
  at::Tensor leave(const at::Tensor& partial) const;

  // For layers that all ranks compute identically on whole sequences.
  at::Tensor whole_sequence(const at::Tensor& hidden) const;
  at::Tensor own_rows(const at::Tensor& whole) const;

  /// Partial sums [N, C] of each rank -> their sum: all-reduce in forward, identity in backward.
  at::Tensor sum(const at::Tensor& partial) const;
  /// Identity in forward, all-reduce in backward (a replicated input).
  at::Tensor with_summed_gradient(const at::Tensor& shared) const;
  /// As with_summed_gradient for a weight applied to hidden states: needed only with sequence parallelism, where ranks
  /// have different rows.
  at::Tensor for_own_rows(const at::Tensor& weight) const;

 private:
  int64_t size_ = 1, rank_ = 0;
  bool sequence_parallel_ = false;
  ProcessGroupPtr group_;
};

using TensorParallelRanksPtr = std::shared_ptr<TensorParallelRanks>;

}  // namespace megashard
