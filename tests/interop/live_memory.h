#pragma once

#include <cstdint>

/// Bytes that tensors on the CPU hold, counted where their memory is taken and given back, in
/// whatever thread: the same count of a C++ program and of PyTorch, into which this library is
/// loaded by ctypes. What PyTorch's profiler records lacks what Gloo's threads free.
extern "C" {
void live_memory_start();             ///< once; what is there already is never counted
void live_memory_of_this_thread();    ///< what it takes is counted apart from the process's (a rank)
void live_memory_add(int64_t bytes);  ///< of another allocator
void live_memory_restart_peak();
int64_t live_memory_now();
int64_t live_memory_peak();
}
