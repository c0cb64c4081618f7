#pragma once

#include <cstdint>

/// Counts the bytes of CPU tensors when they are allocated and freed, on all threads. It counts the same for a C++
/// program and for PyTorch, which loads this library by ctypes. (PyTorch's profiler misses what Gloo's threads free.)
extern "C" {
void live_memory_start();             ///< call once; memory allocated before is never counted
void live_memory_of_this_thread();    ///< counts this thread (a rank) separately from the process
void live_memory_add(int64_t bytes);  ///< adds bytes of another allocator
void live_memory_restart_peak();
int64_t live_memory_now();
int64_t live_memory_peak();
}
