#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Whether rotate_columns_ takes queries, keys and values [B, T, width] each: columns side by side of one tensor, of
/// which the cosines' dtype and device have the kernel.
bool can_rotate_columns(at::TensorList columns, const at::Tensor& cos);

/// rotate() of fused_ops.h, bit for bit, of queries and keys in the place where joint_linear left them beside the
/// values. Heads have head_dim channels; returns [B, T, heads, head_dim] each. Gradients are columns of one tensor
/// again, so that joint_linear does not copy them together.
std::vector<at::Tensor> rotate_columns_(at::TensorList columns, int64_t head_dim, const at::Tensor& cos,
                                        const at::Tensor& sin);

}  // namespace megashard
