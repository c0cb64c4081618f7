#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <bit>
#include <functional>

namespace megashard {

/// CPU memory that is handed out again at the same addresses: gathered parameters and communication
/// buffers come and go once a layer, and the C library would either give pages back each time (page
/// faults cost more than the copy) or keep far too many. Freed blocks wait in size classes (steps
/// of at most 1/8) for the life of the process. Thread safe.
c10::Allocator* cpu_buffer_pool();

/// The bytes of the block that holds so many.
constexpr size_t pooled_size(size_t bytes) {
  const size_t eighth = std::bit_floor(bytes) / 8;
  const size_t step = eighth < 64 ? 64 : eighth;
  return (bytes + step - 1) / step * step;
}

/// The bytes of all that it has handed out and that have not come back.
int64_t cpu_buffer_pool_bytes();

/// Called with the bytes of each buffer that the pool hands out, and with their negative when it
/// comes back; under the pool's lock. For tests of peaks. Null: nobody listens.
void observe_cpu_buffer_pool(std::function<void(int64_t bytes)> observer);

/// Uninitialised tensor for communication: from the pool on CPUs, from the device's caching
/// allocator elsewhere.
at::Tensor pooled_empty(int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace megashard
