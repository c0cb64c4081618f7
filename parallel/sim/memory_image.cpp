#include "parallel/sim/memory_image.h"

#include <cstring>

#include "parallel/sim/sim_device.h"

namespace megashard::sim {

MemoryImage::MemoryImage(const SimDevice& device) {
  device.pools.over_blocks([&](char* address, size_t bytes) {
    const char* mirror = Arena::get().mirror(address);
    parts_.push_back({address, {mirror, mirror + bytes}});
  });
}

void MemoryImage::restore() const {
  for (const Part& part : parts_) std::memcpy(Arena::get().mirror(part.address), part.bytes.data(), part.bytes.size());
}

}  // namespace megashard::sim
