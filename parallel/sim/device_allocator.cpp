#include "parallel/sim/device_allocator.h"

#include <cstring>
#include <mutex>

#include "parallel/sim/operation.h"
#include "parallel/sim/settings.h"

namespace megashard::sim {
namespace {

void free_memory(void* address) {
  if (address == nullptr) return;
  SimDevice& device = SimDevice::at(Arena::get().region_of(address));
  const std::lock_guard lock(device.mutex);
  device.pools.free(static_cast<char*>(address));
}

template <class Visit>
auto with_device(int index, const Visit& visit) {
  SimDevice& device = SimDevice::at(index);
  const std::lock_guard lock(device.mutex);
  return visit(device);
}

template <class Visit>
void over_stats(c10::CachingDeviceAllocator::DeviceStats& stats, const Visit& visit) {
  for (auto* all : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
                    &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (auto& stat : *all) visit(stat);
  }
}

}  // namespace

DeviceAllocator& DeviceAllocator::get() {
  static auto* allocator = new DeviceAllocator;
  return *allocator;
}

c10::DataPtr DeviceAllocator::allocate(size_t bytes) { return allocate_on(bytes, current_device()); }

c10::DataPtr DeviceAllocator::allocate_on(size_t bytes, int index) {
  return with_device(index, [&](SimDevice& device) {
    char* address = device.pools.allocate(bytes, current_stream(device.index));
    return c10::DataPtr(address, address, &free_memory,
                        c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.index)));
  });
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const { return &free_memory; }

void DeviceAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  Operation operation(SimDevice::at(Arena::get().region_of(to)), "copy_data");
  operation.reads(from, bytes);
  operation.writes(to, bytes);
  char* target = Arena::get().mirror(to);
  const char* source = Arena::get().reachable(from);
  operation.run([=] { std::memcpy(target, source, bytes); });
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  with_device(current_device(), [](SimDevice& device) { device.pools.empty_cache(); });
}

void DeviceAllocator::recordStream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get() == nullptr) return;
  with_device(stream.device_index(), [&](SimDevice& device) { device.pools.record_stream(memory.get(), stream.id()); });
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex index) {
  return with_device(index, [](SimDevice& device) { return device.pools.stats(); });
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex index) {
  with_device(
      index, [](SimDevice& device) { over_stats(device.pools.stats(), [](auto& stat) { stat.reset_accumulated(); }); });
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex index) {
  with_device(index,
              [](SimDevice& device) { over_stats(device.pools.stats(), [](auto& stat) { stat.reset_peak(); }); });
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex index) {
  return with_device(index, [](SimDevice& device) {
    return std::pair{settings().capacity - device.pools.reserved(), settings().capacity};
  });
}

}  // namespace megashard::sim
