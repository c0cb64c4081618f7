#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// A contiguous view of a 1-D buffer's memory from element `offset` on, in the buffer's dtype,
/// without the cost of dispatched view operators and without autograd.
at::Tensor flat_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);

/// The same over a buffer of bytes, in another dtype; `byte_offset` is a multiple of the element
/// size.
at::Tensor typed_view(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes,
                      int64_t byte_offset);
/// Row i starts `row_stride` elements after row i - 1: sizes [rows, numel].
at::Tensor typed_rows(const at::Tensor& bytes, at::ScalarType dtype, int64_t rows, int64_t numel,
                      int64_t row_stride, int64_t byte_offset);

}  // namespace megashard
