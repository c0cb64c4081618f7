#include "parallel/sim/resident_blocks.h"

#include <algorithm>

#include "parallel/device/buffer_pool.h"

namespace megashard::sim {

void ResidentBlocks::take(const void* address, size_t bytes) {
  Block block{.bytes = bytes, .offset = 0};
  if (bytes < kPooledFrom) {
    small_ += static_cast<int64_t>(bytes);
    most_small_ = std::max(most_small_, small_);
  } else {
    block.offset = large_.take(bytes);
  }
  held_.insert_or_assign(address, block);
}

void ResidentBlocks::give_back(const void* address) {
  const auto found = held_.find(address);
  if (found == held_.end()) return;
  const auto [bytes, offset] = found->second;
  held_.erase(found);
  if (bytes < kPooledFrom) {
    small_ -= static_cast<int64_t>(bytes);
  } else {
    large_.give_back(offset, bytes);
  }
}

}  // namespace megashard::sim
