#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/row_groups.h"

/// Products of each group of rows with its own matrix, without autograd. GPUs use one kernel, at::_grouped_mm, which
/// reads the group boundaries on the device; CPUs compute one product per group into its rows, as linear_products.h
/// does.
namespace megashard {

/// A matrix [out, in] per group: one stacked tensor [groups, out, in], or separate tensors.
struct GroupMatrices {
  at::Tensor stacked;     ///< undefined if separate
  at::TensorList single;  ///< if `stacked` is undefined

  at::Tensor of(int64_t group) const { return stacked.defined() ? stacked[group] : single[static_cast<size_t>(group)]; }
  int64_t rows() const { return stacked.defined() ? stacked.size(1) : single[0].size(0); }
  int64_t columns() const { return stacked.defined() ? stacked.size(2) : single[0].size(1); }
};

/// True if at::_grouped_mm has one kernel for such rows and matrices on x's device: bf16 on Hopper and Blackwell, fewer
/// than 1,024 matrices, rows of a multiple of 16 bytes. Its other implementations block the host.
bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups);

/// x W^T; x [N, in] -> [N, out]
at::Tensor grouped_product(const at::Tensor& x, const GroupMatrices& matrices, RowGroups& groups);
/// grad W; grad [N, out] -> [N, in]
at::Tensor grouped_gradient_of_input(const at::Tensor& grad, const GroupMatrices& matrices, RowGroups& groups);
/// grad^T x; [N, out], [N, in] -> [groups, out, in], zeros for a group without rows
at::Tensor grouped_gradient_of_weight(const at::Tensor& grad, const at::Tensor& x, RowGroups& groups);

}  // namespace megashard
