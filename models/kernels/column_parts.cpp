#include "models/kernels/column_parts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <c10/util/accumulate.h>

namespace megashard {

std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    parts.push_back(whole.narrow(dim, first, size));
    first += size;
  }
  return parts;
}

namespace {

int64_t sum_of_widths(at::TensorList columns) {
  int64_t width = 0;
  for (const auto& each : columns) width += each.size(-1);
  return width;
}

}  // namespace

bool are_side_by_side(at::TensorList columns) {
  bool beside = true;
  int64_t offset = columns[0].storage_offset(), stride = sum_of_widths(columns);
  for (int64_t dim = columns[0].dim() - 2; dim >= 0; --dim) {
    for (const auto& each : columns) beside &= each.stride(dim) == stride;
    stride *= columns[0].size(dim);
  }
  for (const auto& each : columns) {
    beside &= each.stride(-1) == 1 && each.is_alias_of(columns[0]) && each.storage_offset() == offset;
    offset += each.size(-1);
  }
  return beside;
}

at::Tensor joined_columns(at::TensorList columns) {
  const int64_t width = sum_of_widths(columns);
  const int64_t rows = c10::multiply_integers(columns[0].sizes().slice(0, columns[0].dim() - 1));
  if (are_side_by_side(columns)) return columns[0].as_strided({rows, width}, {width, 1});
  std::vector<at::Tensor> flat;
  for (const auto& each : columns) flat.push_back(each.reshape({rows, each.size(-1)}));
  return at::cat(flat, 1);
}

}  // namespace megashard
