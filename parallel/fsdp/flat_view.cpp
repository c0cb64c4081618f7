#include "parallel/fsdp/flat_view.h"

#include <c10/core/TensorImpl.h>

namespace megashard {

at::Tensor flat_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage()),
                                                       buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  view.unsafeGetTensorImpl()->set_storage_offset(buffer.storage_offset() + offset);
  return view;
}

at::Tensor typed_view(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes,
                      int64_t byte_offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(bytes.storage()), bytes.key_set(), c10::scalarTypeToTypeMeta(dtype));
  const int64_t from = bytes.storage_offset() + byte_offset;
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  view.unsafeGetTensorImpl()->set_storage_offset(from /
                                                 static_cast<int64_t>(c10::elementSize(dtype)));
  return view;
}

at::Tensor typed_rows(const at::Tensor& bytes, at::ScalarType dtype, int64_t rows, int64_t numel,
                      int64_t row_stride, int64_t byte_offset) {
  auto view = typed_view(bytes, dtype, {rows, numel}, byte_offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef({rows, numel}),
                                                    at::IntArrayRef({row_stride, 1}));
  return view;
}

}  // namespace megashard
