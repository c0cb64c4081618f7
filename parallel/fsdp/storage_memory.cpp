#include "parallel/fsdp/storage_memory.h"

#include <ATen/EmptyTensor.h>

#include <utility>

namespace megashard {
namespace {

// StorageImpl can start to refuse reads but offers no way back. Explicit instantiation may name a
// private member: this takes the flag's address, and a LibTorch that renames it fails to compile
// here. What sets the memory also lets writes look at the flag.
template <bool c10::StorageImpl::*Flag>
struct RefusesReads {
  friend bool c10::StorageImpl::*refuses_reads_flag() { return Flag; }
};
bool c10::StorageImpl::*refuses_reads_flag();
template struct RefusesReads<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void set_gone_sentence(c10::StorageImpl& storage, std::string sentence) {
  storage.get_extra_meta().custom_data_ptr_error_msg_ = std::move(sentence);
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

at::Tensor bytes_of(const c10::Storage& storage) {
  const auto key =
      storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return tensor;
}

}  // namespace megashard
