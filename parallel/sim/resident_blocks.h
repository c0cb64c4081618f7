#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "parallel/device/range_allocator.h"

namespace megashard::sim {

/// Resident memory of tensors in a plan of a CPU: allocates like PooledLargeTensors and cpu_buffer_pool(), but without
/// memory. A page becomes resident when first touched and stays.
class ResidentBlocks {
 public:
  void take(const void* address, size_t bytes);
  void give_back(const void* address);
  int64_t bytes() const { return static_cast<int64_t>(large_.end()) + most_small_; }

 private:
  struct Block {
    size_t bytes, offset;
  };
  std::unordered_map<const void*, Block> held_;
  RangeAllocator large_;
  int64_t small_ = 0, most_small_ = 0;  // in the C library's heap
};

}  // namespace megashard::sim
