#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace megashard {

enum class MemoryClass {
  kUnsharded,      ///< gathered parameters
  kCommunication,  ///< buffers that collectives send from and receive into
};

/// What FSDP holds for a while, in bytes, beside what parameters, gradients and optimizer always hold.
struct MemoryUse {
  int64_t unsharded = 0;
  int64_t communication = 0;  ///< reduced gradients too, which stay where they were received
};

/// Calls `observer`, of which there is one in a process, whenever some of it is taken, from the thread that takes it,
/// one call at a time. What is taken from here on is counted. Null: no more.
void observe_memory_use(std::function<void(const MemoryUse& use)> observer);

/// What is held now, of what was counted.
MemoryUse memory_use();

/// For who takes it: `memory`, of so many bytes, counted until it is given back; itself while nobody observes.
c10::DataPtr counted_memory(MemoryClass of, c10::DataPtr memory, size_t bytes);
/// Whether a tensor lies in memory that was counted as communication.
bool is_counted_communication(const at::Tensor& tensor);

}  // namespace megashard
