// ATen's interface to CUDA as a whole. Must be registered before its first use.

#include <ATen/detail/CUDAHooksInterface.h>

#include "parallel/sim/arena.h"
#include "parallel/sim/device_allocator.h"
#include "parallel/sim/generator.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(sim::current_device()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex former = current_device();
    if (device >= 0) set_current_device(device);
    return former;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? sim::current_device() : device);
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(Arena::get().region_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::get().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &DeviceAllocator::get(); }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    SimDevice& device = SimDevice::at(index);
    const std::lock_guard lock(device.mutex);
    device.host_waits_for_all("cudaDeviceSynchronize");
  }
};

}  // namespace
}  // namespace megashard::sim

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, megashard::sim::Hooks)
