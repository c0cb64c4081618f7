#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <mutex>
#include <string>

namespace megashard {

/// One memory block for several adjacent unsharded storages: allocated with the first storage, freed with the last.
class AdjacentMemory : public c10::intrusive_ptr_target {
 public:
  AdjacentMemory(size_t bytes, c10::Allocator* allocator) : bytes_(bytes), allocator_(allocator) {}
  c10::DataPtr part(size_t offset);  ///< keeps the whole block alive

 private:
  static void drop_part(void* context);

  const size_t bytes_;
  c10::Allocator* const allocator_;
  std::mutex mutex_;
  c10::DataPtr memory_;
  int parts_ = 0;
};

/// Unsharded form of one parameter: a tensor whose TensorImpl and StorageImpl live as long as the parameter, so that
/// views saved by autograd in forward see the bytes all-gathered for backward. Only the memory is freed and allocated
/// again. While it is freed, the storage is poisoned: reading any view throws an error that names the parameter.
class UnshardedStorage {
 public:
  UnshardedStorage() = default;
  UnshardedStorage(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

  const at::Tensor& tensor() const { return tensor_; }  ///< contiguous, no grad, own version counter
  const at::Tensor& bytes() const { return bytes_; }    ///< same storage as a 1-D uint8 tensor
  bool allocated() const { return allocated_; }
  bool owns(const c10::StorageImpl* storage) const { return storage == storage_; }
  static bool any_owns(const c10::StorageImpl* storage);  ///< true if any UnshardedStorage owns it
  /// True if other views are alive, e.g. saved by autograd. Call while the parameter is unsharded.
  bool has_views() const { return tensor_.storage().use_count() > kOwnReferences; }
  void set_name(const std::string& name);  ///< for errors

  /// From the next allocation on, uses memory at `offset` of the shared block.
  void lie_in(c10::intrusive_ptr<AdjacentMemory> memory, size_t offset);
  /// Shared block of the unsharded storage under a tensor; null if there is none.
  static const AdjacentMemory* adjacent_memory(const at::Tensor& tensor);

  /// Allocates from the buffer pool (CPU) or the caching allocator on the current stream; contents undefined. No-op if
  /// allocated.
  void allocate();
  void release();

 private:
  static constexpr size_t kOwnReferences = 3;  // tensor_, bytes_ and the parameter

  at::Tensor tensor_;
  at::Tensor bytes_;
  c10::StorageImpl* storage_ = nullptr;  // of tensor_
  bool allocated_ = false;
};

}  // namespace megashard
