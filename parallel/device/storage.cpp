#include "parallel/device/storage.h"

#include <ATen/EmptyTensor.h>

#include <utility>

namespace megashard {
namespace {

// StorageImpl can start to refuse reads but has no way back. Explicit instantiation may name a private member: this
// takes the flag's address, and a LibTorch that renames it fails to compile here. Setting the memory also makes writes
// check the flag.
template <bool c10::StorageImpl::*Flag>
struct RefusesReads {
  friend bool c10::StorageImpl::*refuses_reads_flag() { return Flag; }
};
bool c10::StorageImpl::*refuses_reads_flag();
template struct RefusesReads<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void set_missing_message(c10::StorageImpl& storage, std::string message) {
  storage.get_extra_meta().custom_data_ptr_error_msg_ = std::move(message);
}

c10::DataPtr take_memory(c10::StorageImpl& storage) {
  c10::DataPtr memory = std::move(storage._mutable_data_ptr_no_checks());
  storage.*refuses_reads_flag() = true;
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  return memory;
}

void give_memory(c10::StorageImpl& storage, c10::DataPtr memory) {
  storage.*refuses_reads_flag() = false;
  storage.set_data_ptr_noswap(std::move(memory));
}

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKeySet keys, at::ScalarType dtype,
                       at::IntArrayRef sizes, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (offset != 0) tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes) {
  const auto key = storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  return tensor_over(storage, c10::DispatchKeySet(key), dtype, sizes);
}

at::Tensor bytes_of(const c10::Storage& storage) {
  return tensor_over(storage, at::kByte, {static_cast<int64_t>(storage.nbytes())});
}

at::Tensor flat_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  return tensor_over(buffer.storage(), buffer.key_set(), buffer.scalar_type(), sizes, buffer.storage_offset() + offset);
}

at::Tensor typed_view(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes, int64_t byte_offset) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  return tensor_over(bytes.storage(), bytes.key_set(), dtype, sizes, (bytes.storage_offset() + byte_offset) / element);
}

at::Tensor typed_rows(const at::Tensor& bytes, at::ScalarType dtype, int64_t rows, int64_t numel, int64_t row_stride,
                      int64_t byte_offset) {
  auto view = typed_view(bytes, dtype, {rows, numel}, byte_offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef({rows, numel}), at::IntArrayRef({row_stride, 1}));
  return view;
}

}  // namespace megashard
