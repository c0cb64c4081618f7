#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Parts of `whole` along `dim`, of these sizes and side by side, without autograd's knowledge that they are views of
/// one output.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes);

/// Whether tensors [..., width] are columns side by side of one.
bool are_side_by_side(at::TensorList columns);

/// [N, sum of widths] of tensors [..., width]: what they are columns of, or a copy.
at::Tensor joined_columns(at::TensorList columns);

}  // namespace megashard
