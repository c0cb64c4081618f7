// c10's interface for a device type: current device and stream, streams and events.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <mutex>

#include "parallel/sim/device_allocator.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

template <class Visit>
auto locked(int index, const Visit& visit) {
  SimDevice& device = SimDevice::at(index);
  const std::lock_guard lock(device.mutex);
  return visit(device);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device former = getDevice();
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (0 <= device.index() && device.index() < kDevices) set_current_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_at(device, current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return locked(index_of(device),
                  [&](SimDevice& sim) { return stream_at(device, sim.next_pool_stream(high_priority)); });
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_at(stream.device(), exchange_current_stream(index_of(stream.device()), stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    locked(index_of(stream.device()), [&](SimDevice& sim) { sim.record(*static_cast<Event*>(*event), stream.id()); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    locked(index_of(stream.device()), [&](SimDevice& sim) { sim.wait(*static_cast<Event*>(event), stream.id()); });
  }
  bool queryEvent(void* event) const override {
    with_event(event, [](SimDevice& sim, const Event& recorded) { sim.host_saw(recorded); });
    return true;
  }
  void synchronizeEvent(void* event) const override {
    with_event(event, [](SimDevice& sim, const Event& recorded) {
      sim.host_waits_for_event(recorded, "cudaEventSynchronize");
    });
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* /*first*/, void* /*second*/, const c10::DeviceIndex /*device*/) const override { return 0; }

  bool queryStream(const c10::Stream& stream) const override {
    synchronize(stream, nullptr);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream, "cudaStreamSynchronize"); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    locked(index < 0 ? current_device() : index,
           [](SimDevice& sim) { sim.host_waits_for_all("cudaDeviceSynchronize"); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    DeviceAllocator::get().recordStream(memory, stream);
  }

 private:
  static c10::Device device_at(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
  static int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
  static c10::Stream stream_at(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(index_of(device)), id);
  }
  template <class Visit>
  static void with_event(void* event, const Visit& visit) {
    const auto* recorded = static_cast<const Event*>(event);
    if (recorded == nullptr || recorded->device < 0) return;
    locked(recorded->device, [&](SimDevice& sim) { visit(sim, *recorded); });
  }
  static void synchronize(const c10::Stream& stream, const char* what) {
    locked(index_of(stream.device()), [&](SimDevice& sim) { sim.host_waits_for_stream(stream.id(), what); });
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace megashard::sim
