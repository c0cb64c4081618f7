#include "parallel/sim/memory_image.h"

#include <algorithm>
#include <cstring>

#include "parallel/sim/sim_device.h"

namespace megashard::sim {

MemoryImage::MemoryImage(const SimDevice& device) {
  device.pools.over_segments([&](char* address, size_t bytes) {
    const char* mirror = Arena::get().mirror(address);
    parts_.push_back({address, {mirror, mirror + bytes}});
  });
}

void MemoryImage::restore() const {
  for (const Part& part : parts_)
    std::memcpy(Arena::get().mirror(part.address), part.bytes.data(), part.bytes.size());
}

const MemoryImage::Part* MemoryImage::part_at(const char* address) const {
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const Part& part) { return part.address == address; });
  return found == parts_.end() ? nullptr : &*found;
}

}  // namespace megashard::sim
