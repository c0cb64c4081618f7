#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Splits `whole` along `dim` into parts of these sizes, without autograd tracking that they are views of one output.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes);

/// True if tensors [..., width] are adjacent columns of one tensor.
bool are_side_by_side(at::TensorList columns);

/// [N, sum of widths] of tensors [..., width]: the tensor that they are columns of, or a copy.
at::Tensor joined_columns(at::TensorList columns);

}  // namespace megashard
