#pragma once

#include <c10/core/Allocator.h>

namespace megashard {

/// Scope in which CPU tensors of at least kPooledFrom bytes (buffer_pool.h) come from cpu_buffer_pool(). In the C
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
