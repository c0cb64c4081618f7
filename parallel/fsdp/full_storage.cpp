#include "parallel/fsdp/full_storage.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

#include "parallel/collectives/buffer_pool.h"
#include "parallel/fsdp/flat_view.h"
#include "parallel/fsdp/storage_memory.h"

namespace megashard {
namespace {

/// Known by its type, so that a saved tensor can be recognised without looking for its group.
struct GatheredStorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
};

c10::Storage empty_storage(size_t nbytes, c10::Device device) {
  auto* allocator = device.is_cpu() ? cpu_buffer_pool() : c10::GetAllocator(device.type());
  return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(c10::make_intrusive<GatheredStorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), allocator,
      /*resizable=*/false)));
}

at::Tensor over_storage(const c10::Storage& storage, at::IntArrayRef sizes, at::ScalarType dtype) {
  const c10::DispatchKeySet keys(storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU
                                                                    : c10::DispatchKey::CUDA);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys,
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

FullStorage::FullStorage(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const c10::InferenceMode no_inference(false);  // or the tensors could never be trained
  nbytes_ = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  const auto storage = empty_storage(nbytes_, device);
  storage_ = storage.unsafeGetStorageImpl();
  tensor_ = over_storage(storage, sizes, dtype);
  bytes_ = bytes_of(storage);
  set_name("?");
  release();
}

bool FullStorage::is_one(const c10::StorageImpl* storage) {
  return dynamic_cast<const GatheredStorageImpl*>(storage) != nullptr;
}

void FullStorage::set_name(const std::string& name) {
  set_gone_sentence(
      *storage_,
      "parameter '" + name +
          "' was resharded: its full tensor is not available here. Use the parameter inside its "
          "unit's forward only, and do not keep views of it");
}

at::Tensor FullStorage::lasting_part(int64_t numel, int64_t offset) {
  ++own_references_;
  return flat_view(bytes_, {numel}, offset);
}

void FullStorage::allocate() {
  if (allocated_) return;
  give_memory(*storage_, storage_->allocator()->allocate(nbytes_));
  allocated_ = true;
}

void FullStorage::release() {
  take_memory(*storage_);
  allocated_ = false;
}

}  // namespace megashard
