#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace megashard {

/// Blocks of at least this size are parts of one address range; smaller ones come from size classes (steps of at most
/// 1/8).
constexpr size_t kPooledFrom = 128 << 10;

/// Allocator that reuses CPU memory. Unsharded parameters, communication buffers, activations and gradients come and go
/// in each step; the C library would either return pages each time (page faults cost more than the copy) or keep far
/// too many. Freed memory stays for the life of the process. Large free blocks merge with free neighbours, so that
/// gradients reuse the memory of activations. Thread safe.
c10::Allocator* cpu_buffer_pool();

/// Bytes allocated from the pool and not yet freed.
int64_t cpu_buffer_pool_bytes();

/// Calls `observer` with the bytes of each buffer allocated from the pool, and with their negative when it is freed,
/// under the pool's lock. For tests of peaks. Null removes it.
void observe_cpu_buffer_pool(std::function<void(int64_t bytes)> observer);

/// Uninitialised tensor for communication: from the pool on CPUs, else from the device's caching allocator.
at::Tensor pooled_empty(int64_t numel, at::ScalarType dtype, c10::Device device);

/// Cache of memory that needs a collective call to create (windows over it). Freed memory is reused for tensors of the
/// same size on the same stream, whose order separates the two uses. Ranks that request the same sizes on the same
/// streams and free them in the same order create new memory at the same time, whatever the device's allocator does.
/// Thread safe; tensors may outlive it.
class KeptBuffers {
 public:
  KeptBuffers();

  /// `make` returns `bytes` new bytes as a 1-D uint8 tensor.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const c10::Stream& stream,
                  const std::function<at::Tensor(int64_t bytes)>& make);

 private:
  struct Free;
  std::shared_ptr<Free> free_;
};

/// Scope in which CPU tensors of at least kPooledFrom bytes come from cpu_buffer_pool(). In the C
/// library's heap, smaller tensors would split the holes they leave, and the heap would outgrow the live memory (8 M
/// parameters, 8 x 1,024 tokens: 1,091 MiB instead of 862). Tensors may outlive the scope.
class PooledLargeTensors {
 public:
  PooledLargeTensors();
  ~PooledLargeTensors();
  PooledLargeTensors(const PooledLargeTensors&) = delete;
  PooledLargeTensors& operator=(const PooledLargeTensors&) = delete;

 private:
  c10::Allocator* before_;
};

}  // namespace megashard
