#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <functional>

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

}  // namespace megashard
