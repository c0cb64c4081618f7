#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/row_groups.h"

/// Products of each group of rows with its own matrix, without autograd. GPUs use one kernel where there is one,
/// at::_grouped_mm, which reads the group boundaries on the device; else there is one product per group into its rows,
/// and the host reads the boundaries. CPUs multiply as linear_products.h does.
namespace megashard {

/// True if at::_grouped_mm has one kernel for such rows and matrices on x's device: bf16 on Hopper and Blackwell, fewer
/// than 1,024 matrices, rows of a multiple of 16 bytes. Its other implementations block the host.
bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups);

/// x W^T; x [N, in], matrices [groups, out, in] -> [N, out]
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& matrices, RowGroups& groups);
/// grad W; grad [N, out] -> [N, in]
at::Tensor grouped_gradient_of_input(const at::Tensor& grad, const at::Tensor& matrices, RowGroups& groups);
/// grad^T x; [N, out], [N, in] -> [groups, out, in], zeros for a group without rows
at::Tensor grouped_gradient_of_weight(const at::Tensor& grad, const at::Tensor& x, RowGroups& groups);

}  // namespace megashard
