#pragma once

#include <c10/core/Allocator.h>

namespace megashard {

/// While it lives, CPU tensors of 8 MiB and more are of cpu_buffer_pool(). A step asks for the sizes that the step
/// before asked for; in the C library's heap small tensors would split the holes that large ones leave, and the heap
/// would grow past what lives at any time. Tensors may outlive it, and be freed when there is none.
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
