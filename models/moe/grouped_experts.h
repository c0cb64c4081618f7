#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/kernels/row_groups.h"
#include "models/layers/mlp.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// The experts of a layer, modules of their own for names, checkpoints, adapters and units, and a grouped product for
/// each of their projections where nothing is in the way.
class GroupedExperts {
 public:
  GroupedExperts() = default;
  /// Their weights will lie adjacent once their unit is gathered.
  explicit GroupedExperts(std::vector<std::shared_ptr<Hooked<Mlp>>> experts);

  /// Rows [N, C], sorted by expert -> their results. Experts that are units, are recomputed, or have adapters, biases
  /// or fp8 run one after the other; so do all on a GPU that has no kernel for their dtype or sizes, and there the host
  /// waits for the numbers of rows.
  at::Tensor forward(const at::Tensor& rows, const RowGroupsPtr& groups) const;

 private:
  /// Undefined: they are to run one after the other.
  at::Tensor grouped(const at::Tensor& rows, const RowGroupsPtr& groups) const;

  std::vector<std::shared_ptr<Hooked<Mlp>>> experts_;
};

}  // namespace megashard
