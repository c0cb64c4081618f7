#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

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

}  // namespace megashard
