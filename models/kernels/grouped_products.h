#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/kernels/row_groups.h"

/// Products of each group of rows with its own matrix, without autograd. GPUs use one kernel where there is one,
/// at::_grouped_mm, which reads the group boundaries on the device; else there is one product per group into its rows,
/// and the host reads the boundaries. CPUs multiply as linear_products.h does.
namespace megashard {

/// True if at::_grouped_mm has one kernel for such rows and matrices on x's device: bf16 on Hopper and Blackwell, fewer
/// than 1,024 matrices, rows of a multiple of 16 bytes. Its other implementations block the host.
bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups);

/// x W^T of each part; x [N, in], weight [groups, parts, out, in] -> [N, out] a part, with the kernel as columns of one
/// tensor.
std::vector<at::Tensor> grouped_product(const at::Tensor& x, const at::Tensor& weight, RowGroups& groups);
/// The sum of the parts' grad W; grads [N, out] -> [N, in]
at::Tensor grouped_gradient_of_input(at::TensorList grads, const at::Tensor& weight, RowGroups& groups);
/// grad^T x of each part; grads [N, out], x [N, in] -> [groups, parts, out, in], zeros for a group without rows
at::Tensor grouped_gradient_of_weight(at::TensorList grads, const at::Tensor& x, RowGroups& groups);

}  // namespace megashard
