#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace megashard {

/// The gathered form of one parameter: a tensor whose TensorImpl and StorageImpl live as long as
/// the parameter, so that views which autograd saved in forward see the bytes that are gathered
/// again for backward. Only the memory comes and goes. While it is gone the storage is poisoned:
/// reading any view of it throws a sentence.
class FullStorage {
 public:
  FullStorage() = default;
  FullStorage(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

  const at::Tensor& tensor() const {
    return tensor_;
  }  ///< contiguous, no grad; its own version counter
  const at::Tensor& bytes() const { return bytes_; }  ///< the same storage as a 1-D uint8 tensor
  bool allocated() const { return allocated_; }
  bool owns(const c10::StorageImpl* storage) const { return storage == storage_; }
  /// Some of the bytes, for as long as this lives.
  at::Tensor lasting_part(int64_t numel, int64_t offset);
  /// Whether other views are alive, such as autograd saves. For a parameter that is full.
  bool has_views() const { return tensor_.storage().use_count() > own_references_; }
  /// Whether some FullStorage owns it: tensors over it must not be kept or moved by bytes.
  static bool is_one(const c10::StorageImpl* storage);

  /// Memory from the buffer pool (CPU) or the caching allocator on the current stream; contents
  /// undefined.
  void allocate();
  void release();
  void set_name(const std::string& name);  ///< for the sentence

 private:
  at::Tensor tensor_;
  at::Tensor bytes_;
  c10::StorageImpl* storage_ = nullptr;  // of tensor_
  size_t nbytes_ = 0;
  bool allocated_ = false;
  size_t own_references_ = 3;  // tensor_, bytes_ and the parameter; then each lasting_part
};

}  // namespace megashard
