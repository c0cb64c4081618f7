#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/kernels/row_groups.h"

namespace megashard {

/// True if grouped_linear supports these weights: equally many for each of `groups` groups, ordered by group, all of
/// one size and of x's dtype and device. On a GPU they must be adjacent in memory (parallel/fsdp/adjacent_parameters.h)
/// and has_grouped_kernel() must be true; on a CPU they must be adjacent if a group has several.
bool can_group(const at::Tensor& x, at::TensorList weights, int64_t groups);

/// linear(x, weight) of each group's rows with its own weights, as one grouped product, also in backward: x [N, in],
/// weights [out, in] -> one result [N, out] per weight of a group, as columns of one tensor (joint_linear.h). The
/// weights' gradients are rows of one tensor; they are zero for a group without rows.
std::vector<at::Tensor> grouped_linear(const at::Tensor& x, at::TensorList weights, const RowGroupsPtr& groups);

/// swiglu_linear of each group's rows with its own weight: gate, up [N, in], weights [out, in], one per group,
/// supported by can_group for gate -> [N, out].
at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, at::TensorList weights,
                                 const RowGroupsPtr& groups);

}  // namespace megashard
