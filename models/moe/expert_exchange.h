#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "models/kernels/row_groups.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Dispatch of expert parallelism: sends the rows of one forward to the ranks that have their experts, and the results
/// back. Each rank of `ranks` has the same number of experts, in order. All ranks construct one and call its functions
/// together, in forward and in backward.
class ExpertExchange : public torch::CustomClassHolder {
 public:
  /// `counts` [experts] int64: how many of this rank's `rows` go to each expert. Collective. Blocks the host.
  ExpertExchange(ProcessGroupPtr ranks, const at::Tensor& counts, int64_t rows);

  /// The rows from all ranks for each of this rank's experts.
  const RowGroupsPtr& own_rows() const { return own_rows_; }

  /// Rows sorted by expert [n, C] -> the rows for this rank's experts [m, C], sorted by expert. Differentiable, like
  /// send_back.
  static at::Tensor send(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& rows);
  /// Results in the order of send's result -> the results of this rank's rows, in the order of send's argument. An
  /// expert gets gradients from all of `ranks`, each of a loss that is averaged over all ranks: between send and
  /// send_back they are divided by the number of ranks.
  static at::Tensor send_back(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& results);

  int ranks() const { return ranks_->size(); }
  at::Tensor there(const at::Tensor& rows) const;
  at::Tensor back(const at::Tensor& results) const;

 private:
  /// Rows sorted by destination rank -> rows that arrive, sorted by source rank.
  at::Tensor swap(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received) const;

  ProcessGroupPtr ranks_;
  RowGroupsPtr own_rows_;
  std::vector<int64_t> sent_, received_;  // rows to and from each rank
  at::Tensor by_expert_, by_rank_;        // orders of the rows that arrive; undefined: this rank has one expert
};

}  // namespace megashard
