#pragma once

#include <c10/core/Allocator.h>

namespace megashard {

/// While it lives, CPU tensors of kPooledFrom bytes (buffer_pool.h) and more are of cpu_buffer_pool(). In the C
/// library's heap smaller ones would split the holes that they leave, and the heap would grow past what lives at any
/// time (8 M parameters, 8 x 1,024 tokens: 1,091 MiB instead of 862). Tensors may outlive it, and be freed when there
/// is none.
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
