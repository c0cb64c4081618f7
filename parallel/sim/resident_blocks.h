#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace megashard::sim {

/// The resident memory of tensors in a plan of a CPU: as PooledLargeTensors and cpu_buffer_pool() hand it out and keep
/// it, without the memory. A page is resident once it was touched, and stays.
class ResidentBlocks {
 public:
  void take(const void* address, size_t bytes);
  void give_back(const void* address);
  int64_t bytes() const { return large_ + most_small_; }

 private:
  struct Block {
    size_t asked = 0, touched = 0;
  };
  std::unordered_map<const void*, Block> held_;
  std::unordered_map<size_t, std::vector<size_t>> free_;  // by size class: bytes that were touched
  int64_t large_ = 0;                                     // held and free
  int64_t small_ = 0, most_small_ = 0;                    // of the C library's heap
};

}  // namespace megashard::sim
