#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <functional>

namespace megashard {

/// From here on a block is a part of one range of addresses, below it of a size class (steps of at most 1/8).
constexpr size_t kPooledFrom = 128 << 10;

/// CPU memory that is handed out again: gathered parameters, communication buffers, activations and gradients come and
/// go in each step, and the C library would either give pages back each time (page faults cost more than the copy) or
/// keep far too many. What is freed stays for the life of the process, and large blocks join their free neighbours, so
/// that gradients lie where activations were. Thread safe.
c10::Allocator* cpu_buffer_pool();

/// The bytes of all that it has handed out and that have not come back.
int64_t cpu_buffer_pool_bytes();

/// Called with the bytes of each buffer that the pool hands out, and with their negative when it
/// comes back; under the pool's lock. For tests of peaks. Null: nobody listens.
void observe_cpu_buffer_pool(std::function<void(int64_t bytes)> observer);

/// Uninitialised tensor for communication: from the pool on CPUs, from the device's caching
/// allocator elsewhere.
at::Tensor pooled_empty(int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace megashard
