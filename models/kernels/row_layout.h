#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace megashard {

/// Layout of a tensor [..., width] as contiguous rows that start `stride` elements apart: contiguous tensors and
/// columns of these.
struct RowLayout {
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;

  bool operator==(const RowLayout&) const = default;
};
std::optional<RowLayout> row_layout(const at::Tensor& x);

/// Returns both tensors unchanged if they have the same row_layout, else contiguous ones.
std::tuple<at::Tensor, at::Tensor> in_one_layout(const at::Tensor& a, const at::Tensor& b);

/// Two uninitialised tensors with the layout of x, which has a row_layout: contiguous, or adjacent columns of one
/// tensor.
std::tuple<at::Tensor, at::Tensor> empty_pair_like(const at::Tensor& x);

/// Splits `whole` along `dim` into parts of these sizes, without autograd tracking that they are views of one output.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes);

/// True if tensors [..., width] are adjacent columns of one tensor.
bool are_side_by_side(at::TensorList columns);

/// [N, sum of widths] of tensors [..., width]: the tensor that they are columns of, or a copy.
at::Tensor joined_columns(at::TensorList columns);

/// True if rotate_columns_ supports queries, keys and values [B, T, width]: adjacent columns of one tensor, and a
/// kernel for the cosines' dtype and device.
bool can_rotate_columns(at::TensorList columns, const at::Tensor& cos);

/// rotate() of fused_ops.h, bit for bit, of queries and keys in place, as JointLinears returned them beside the values.
/// Heads have head_dim channels; returns [B, T, heads, head_dim] each. Gradients are again columns of one tensor, which
/// JointLinears does not copy.
std::vector<at::Tensor> rotate_columns_(at::TensorList columns, int64_t head_dim, const at::Tensor& cos,
                                        const at::Tensor& sin);

}  // namespace megashard
