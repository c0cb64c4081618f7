#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace megashard {

/// A tensor [..., width] as rows of dense elements that begin `stride` elements apart: dense tensors, and columns of
/// such.
struct RowLayout {
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;

  bool operator==(const RowLayout&) const = default;
};
std::optional<RowLayout> row_layout(const at::Tensor& x);

/// Both tensors as they are if they have one row_layout, else as dense ones.
std::tuple<at::Tensor, at::Tensor> in_one_layout(const at::Tensor& a, const at::Tensor& b);

/// Two tensors without values, laid out as x, which has a row_layout: dense ones, or columns side by side of one
/// tensor.
std::tuple<at::Tensor, at::Tensor> empty_pair_like(const at::Tensor& x);

}  // namespace megashard
