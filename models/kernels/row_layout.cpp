#include "models/kernels/row_layout.h"

#include <ATen/ops/empty.h>

namespace megashard {

std::optional<RowLayout> row_layout(const at::Tensor& x) {
  const int64_t dims = x.dim();
  if (dims == 0) return std::nullopt;
  const int64_t width = x.size(-1);
  if (x.is_contiguous()) return RowLayout{width == 0 ? 0 : x.numel() / width, width, width};
  if (dims == 1 || x.stride(-1) != 1 || x.stride(-2) < width) return std::nullopt;
  int64_t rows = x.size(-2);
  for (int64_t dim = dims - 3; dim >= 0; --dim) {
    if (x.stride(dim) != rows * x.stride(-2)) return std::nullopt;
    rows *= x.size(dim);
  }
  return RowLayout{rows, width, x.stride(-2)};
}

std::tuple<at::Tensor, at::Tensor> in_one_layout(const at::Tensor& a, const at::Tensor& b) {
  const auto layout = row_layout(a);
  if (layout && layout == row_layout(b)) return {a, b};
  return {a.contiguous(), b.contiguous()};
}

std::tuple<at::Tensor, at::Tensor> empty_pair_like(const at::Tensor& x) {
  if (x.is_contiguous()) return {at::empty(x.sizes(), x.options()), at::empty(x.sizes(), x.options())};
  auto sizes = x.sizes().vec();
  sizes.back() *= 2;
  const auto both = at::empty(sizes, x.options());
  return {both.narrow(-1, 0, x.size(-1)), both.narrow(-1, x.size(-1), x.size(-1))};
}

}  // namespace megashard
