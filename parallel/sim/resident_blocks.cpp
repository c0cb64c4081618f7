#include "parallel/sim/resident_blocks.h"

#include <algorithm>

#include "parallel/device/buffer_pool.h"
#include "parallel/device/large_blocks.h"

namespace megashard::sim {

void ResidentBlocks::take(const void* address, size_t bytes) {
  Block block{.asked = bytes, .touched = bytes};
  if (bytes < kPooledFrom) {
    small_ += static_cast<int64_t>(bytes);
    most_small_ = std::max(most_small_, small_);
  } else if (auto& free = free_[pooled_size(bytes)]; free.empty()) {
    large_ += static_cast<int64_t>(bytes);
  } else {
    block.touched = std::max(bytes, free.back());
    large_ += static_cast<int64_t>(block.touched - free.back());
    free.pop_back();
  }
  held_.insert_or_assign(address, block);
}

void ResidentBlocks::give_back(const void* address) {
  const auto found = held_.find(address);
  if (found == held_.end()) return;
  const auto [asked, touched] = found->second;
  held_.erase(found);
  if (asked < kPooledFrom) {
    small_ -= static_cast<int64_t>(asked);
  } else {
    free_[pooled_size(asked)].push_back(touched);
  }
}

}  // namespace megashard::sim
