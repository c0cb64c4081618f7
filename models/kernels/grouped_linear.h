#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/kernels/row_groups.h"

namespace megashard {

/// linear(x, weight) of each group's rows with its own weights, as one grouped product, also in backward: x [N, in],
/// weight [groups, out, in], or [groups, parts, out, in] for several weights per group -> one result [N, out] per part,
/// as columns of one tensor (joint_linear.h). The gradient of the weight is zero for a group without rows. A GPU
/// without a kernel for these dtypes and sizes (has_grouped_kernel) computes one product per group, and the host waits
/// for the numbers of rows.
std::vector<at::Tensor> grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroupsPtr& groups);

/// grouped_linear of swiglu(gate, up) without saving it: gate, up [N, in], weight [groups, out, in] -> [N, out].
at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                                 const RowGroupsPtr& groups);

}  // namespace megashard
