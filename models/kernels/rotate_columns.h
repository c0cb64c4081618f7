#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// True if rotate_columns_ supports queries, keys and values [B, T, width]: adjacent columns of one tensor, and a
/// kernel for the cosines' dtype and device.
bool can_rotate_columns(at::TensorList columns, const at::Tensor& cos);

/// rotate() of fused_ops.h, bit for bit, of queries and keys in place, as joint_linear returned them beside the values.
/// Heads have head_dim channels; returns [B, T, heads, head_dim] each. Gradients are again columns of one tensor, which
/// joint_linear does not copy.
std::vector<at::Tensor> rotate_columns_(at::TensorList columns, int64_t head_dim, const at::Tensor& cos,
                                        const at::Tensor& sin);

}  // namespace megashard
