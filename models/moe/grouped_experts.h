#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/kernels/row_groups.h"
#include "models/layers/mlp.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// The experts of a layer: separate modules for names, checkpoints, adapters and units, but computed as one grouped
/// product per projection if possible.
class GroupedExperts {
 public:
  GroupedExperts() = default;
  /// Declares the weights adjacent, so that their unit gathers them side by side.
  explicit GroupedExperts(std::vector<std::shared_ptr<Hooked<Mlp>>> experts);

  /// Rows [N, C], sorted by expert -> their results. Experts run one by one if they are units, are recomputed, or have
  /// adapters, biases or fp8, or if a GPU has no kernel for their dtype or sizes; then, on a GPU, blocks the host for
  /// the numbers of rows.
  at::Tensor forward(const at::Tensor& rows, const RowGroupsPtr& groups) const;

 private:
  /// Undefined: the experts must run one by one.
  at::Tensor grouped(const at::Tensor& rows, const RowGroupsPtr& groups) const;

  std::vector<std::shared_ptr<Hooked<Mlp>>> experts_;
};

}  // namespace megashard
