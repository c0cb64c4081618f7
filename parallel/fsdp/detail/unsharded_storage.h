#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "parallel/fsdp/detail/adjacent_memory.h"

namespace megashard {

/// The unsharded form of one parameter: a tensor whose TensorImpl and StorageImpl live as long as the parameter, so
/// that views which autograd saved in forward see the bytes that are gathered again for backward. Only the memory comes
/// and goes. While it is gone the storage is poisoned: reading any view of it throws an error that names the parameter.
class UnshardedStorage {
 public:
  UnshardedStorage() = default;
  UnshardedStorage(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

  const at::Tensor& tensor() const { return tensor_; }  ///< contiguous, no grad; its own version counter
  const at::Tensor& bytes() const { return bytes_; }    ///< the same storage as a 1-D uint8 tensor
  bool allocated() const { return allocated_; }
  bool owns(const c10::StorageImpl* storage) const { return storage == storage_; }
  static bool any_owns(const c10::StorageImpl* storage);  ///< whether one of all there are does
  /// Whether other views are alive, such as autograd saves. For a parameter that is unsharded.
  bool has_views() const { return tensor_.storage().use_count() > kOwnReferences; }
  void set_name(const std::string& name);  ///< for the error

  /// From the next allocation on, at `offset` of the memory that it shares with others.
  void lie_in(c10::intrusive_ptr<AdjacentMemory> memory, size_t offset);
  /// That of the unsharded storage under a tensor; null: none, or one by itself.
  static const AdjacentMemory* adjacent_memory(const at::Tensor& tensor);

  /// Memory from the buffer pool (CPU) or the caching allocator on the current stream; contents undefined. No-op where
  /// there is some.
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
