#include "parallel/fsdp/detail/unsharded_storage.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "parallel/device/buffer_pool.h"
#include "parallel/device/memory_use.h"
#include "parallel/device/storage.h"

namespace megashard {

c10::DataPtr AdjacentMemory::part(size_t offset) {
  const std::lock_guard lock(mutex_);
  if (parts_ == 0) memory_ = counted_memory(MemoryClass::kUnsharded, allocator_->allocate(bytes_), bytes_);
  ++parts_;
  auto self = c10::intrusive_ptr<AdjacentMemory>::reclaim_copy(this);
  return {static_cast<char*>(memory_.get()) + offset, self.release(), &drop_part, memory_.device()};
}

void AdjacentMemory::drop_part(void* context) {
  const auto self = c10::intrusive_ptr<AdjacentMemory>::reclaim(static_cast<AdjacentMemory*>(context));
  const std::lock_guard lock(self->mutex_);
  if (--self->parts_ == 0) self->memory_.clear();
}

namespace {

/// A type of its own, so that saved tensors are recognised without a search for their group.
struct UnshardedStorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
  c10::intrusive_ptr<AdjacentMemory> adjacent;  // may be null
  size_t offset = 0;                            // within `adjacent`
};

c10::Storage empty_storage(size_t nbytes, c10::Device device) {
  auto* allocator = device.is_cpu() ? cpu_buffer_pool() : c10::GetAllocator(device.type());
  return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(c10::make_intrusive<UnshardedStorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), allocator,
      /*resizable=*/false)));
}

}  // namespace

UnshardedStorage::UnshardedStorage(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const c10::InferenceMode no_inference(false);  // inference tensors could never be trained
  const auto nbytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  const auto storage = empty_storage(nbytes, device);
  storage_ = storage.unsafeGetStorageImpl();
  tensor_ = tensor_over(storage, dtype, sizes);
  bytes_ = bytes_of(storage);
  set_name("?");
  release();
}

void UnshardedStorage::set_name(const std::string& name) {
  set_missing_message(*storage_,
                      "parameter '" + name +
                          "' was resharded: its full tensor is not available here. Use the parameter inside its "
                          "unit's forward only, and do not keep views of it");
}

void UnshardedStorage::lie_in(c10::intrusive_ptr<AdjacentMemory> memory, size_t offset) {
  auto& storage = static_cast<UnshardedStorageImpl&>(*storage_);
  storage.adjacent = std::move(memory);
  storage.offset = offset;
}

const AdjacentMemory* UnshardedStorage::adjacent_memory(const at::Tensor& tensor) {
  const auto* storage = dynamic_cast<const UnshardedStorageImpl*>(tensor.storage().unsafeGetStorageImpl());
  return storage == nullptr ? nullptr : storage->adjacent.get();
}

void UnshardedStorage::allocate() {
  if (allocated_) return;
  const auto& storage = static_cast<UnshardedStorageImpl&>(*storage_);
  const auto alone = [bytes = storage.nbytes(), allocator = storage_->allocator()] {
    return counted_memory(MemoryClass::kUnsharded, allocator->allocate(bytes), bytes);
  };
  give_memory(*storage_, storage.adjacent ? storage.adjacent->part(storage.offset) : alone());
  allocated_ = true;
}

void UnshardedStorage::release() {
  take_memory(*storage_);
  allocated_ = false;
}

bool UnshardedStorage::any_owns(const c10::StorageImpl* storage) {
  return dynamic_cast<const UnshardedStorageImpl*>(storage) != nullptr;
}

}  // namespace megashard
