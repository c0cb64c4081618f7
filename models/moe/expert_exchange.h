#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "models/kernels/row_groups.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// How the rows of one forward travel to the ranks that have their experts, and back: expert
/// parallelism's dispatch. Experts lie on `ranks` in order, as many on each. All ranks make one and
/// call its functions together, in forward and in backward. The wire carries the rows and no more.
class ExpertExchange : public torch::CustomClassHolder {
 public:
  /// `counts` [experts] int64: of `rows`, this rank's, those for each expert. Collective, and the host waits.
  ExpertExchange(ProcessGroupPtr ranks, const at::Tensor& counts, int64_t rows);

  /// Of each of this rank's experts, from all ranks.
  const RowGroupsPtr& own_rows() const { return own_rows_; }

  /// Rows sorted by expert [n, C] -> the rows for this rank's experts [m, C], sorted by expert.
  /// Differentiable, as is the way back.
  static at::Tensor send(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& rows);
  /// Results in the order of send's -> those of this rank's rows, in the order of send's argument.
  /// Gradients of losses that are averaged over all ranks come from all of `ranks` to one expert:
  /// they are divided by their number between send and send_back.
  static at::Tensor send_back(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& results);

  int ranks() const { return ranks_->size(); }
  at::Tensor there(const at::Tensor& rows) const;
  at::Tensor back(const at::Tensor& results) const;

 private:
  /// Rows that are sorted by the rank that they go to -> what arrives, sorted by the rank that it comes from.
  at::Tensor swap(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received) const;

  ProcessGroupPtr ranks_;
  RowGroupsPtr own_rows_;
  std::vector<int64_t> sent_, received_;  // rows to and from each rank
  at::Tensor by_expert_, by_rank_;        // orders of what arrives; undefined: one, as there is one expert here
};

}  // namespace megashard
