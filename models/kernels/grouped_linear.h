#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/kernels/row_groups.h"

namespace megashard {

/// Whether grouped_linear takes these weights, as many for each of `groups` groups and group after group, all of one
/// size and of x's dtype and device. On a GPU they must lie one after the other in memory
/// (parallel/fsdp/adjacent_parameters.h) and has_grouped_kernel() be true; on a CPU they must lie so where a group has
/// several.
bool can_group(const at::Tensor& x, at::TensorList weights, int64_t groups);

/// linear(x, weight) of each group's rows with its own weights, as one grouped product, and so its gradients: x
/// [N, in], weights [out, in] -> as many results [N, out] as a group has weights, columns of one tensor
/// (joint_linear.h). The weights' gradients are rows of one tensor; those of a group without rows are zeros.
std::vector<at::Tensor> grouped_linear(const at::Tensor& x, at::TensorList weights, const RowGroupsPtr& groups);

/// swiglu_linear of each group's rows with its own weight: gate, up [N, in], weights [out, in], one for each group,
/// which can_group takes for gate -> [N, out].
at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, at::TensorList weights,
                                 const RowGroupsPtr& groups);

}  // namespace megashard
