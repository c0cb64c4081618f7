#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/row_groups.h"

/// A product for each group of rows, with a matrix of its own, without autograd. On GPUs one kernel, at::_grouped_mm,
/// which reads on the device where the groups end; on CPUs one product after the other, each into its place, computed
/// as those of linear_products.h.
namespace megashard {

/// One matrix [out, in] for each group: weights one after the other in one tensor [groups, out, in], or each by itself.
struct GroupMatrices {
  at::Tensor stacked;     ///< or undefined
  at::TensorList single;  ///< where `stacked` is undefined

  at::Tensor of(int64_t group) const { return stacked.defined() ? stacked[group] : single[static_cast<size_t>(group)]; }
  int64_t rows() const { return stacked.defined() ? stacked.size(1) : single[0].size(0); }
  int64_t columns() const { return stacked.defined() ? stacked.size(2) : single[0].size(1); }
};

/// Whether at::_grouped_mm has one kernel for such rows and matrices on the device of x: bf16 on Hopper and Blackwell,
/// fewer than 1,024 matrices, rows of whole 16 bytes. Its other ways let the host wait.
bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups);

/// x W^T; x [N, in] -> [N, out]
at::Tensor grouped_product(const at::Tensor& x, const GroupMatrices& matrices, RowGroups& groups);
/// grad W; grad [N, out] -> [N, in]
at::Tensor grouped_gradient_of_input(const at::Tensor& grad, const GroupMatrices& matrices, RowGroups& groups);
/// grad^T x; [N, out], [N, in] -> [groups, out, in], zeros for a group without rows
at::Tensor grouped_gradient_of_weight(const at::Tensor& grad, const at::Tensor& x, RowGroups& groups);

}  // namespace megashard
