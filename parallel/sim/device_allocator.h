#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace megashard::sim {

/// c10 allocator over the pools of all simulated devices: allocates from the calling thread's current device and
/// stream.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DataPtr allocate_on(size_t bytes, int device);
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
};

}  // namespace megashard::sim
