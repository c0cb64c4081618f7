#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace megashard {

enum class MemoryClass {
  kUnsharded,      ///< unsharded parameters
  kCommunication,  ///< input and output buffers of collectives
};

/// Bytes that FSDP holds temporarily, besides parameters, gradients and optimizer state.
struct MemoryUse {
  int64_t unsharded = 0;
  int64_t communication = 0;  ///< includes reduced gradients, which stay in their buffer
};

/// Sets the process's only observer, called on each allocation that counts, from the allocating thread, one call at a
/// time. Counting starts here. Null removes it.
void observe_memory_use(std::function<void(const MemoryUse& use)> observer);

/// Counted bytes held now.
MemoryUse memory_use();

/// Counts `memory` of `bytes` bytes until it is freed; returns it unchanged if there is no observer.
c10::DataPtr counted_memory(MemoryClass of, c10::DataPtr memory, size_t bytes);
/// True if a tensor lies in memory counted as communication.
bool is_counted_communication(const at::Tensor& tensor);

}  // namespace megashard
