#include "parallel/sim/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>

#include <array>

#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  SimGenerator(int device, at::Generator drawn_by)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        drawn_by_(std::move(drawn_by)) {}

  void set_current_seed(uint64_t seed) override { drawn_by_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawn_by_.set_offset(offset); }
  uint64_t get_offset() const override { return drawn_by_.get_offset(); }
  uint64_t current_seed() const override { return drawn_by_.current_seed(); }
  uint64_t seed() override { return drawn_by_.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawn_by_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawn_by_.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), drawn_by_.clone()); }

  const at::Generator& drawn_by() const { return drawn_by_; }

 private:
  at::Generator drawn_by_;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::Generator(c10::make_intrusive<SimGenerator>(device, at::detail::createCPUGenerator()));
}

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (int i = 0; i < kDevices; ++i) (*made)[static_cast<size_t>(i)] = new_generator(i);
    return made;
  }();
  return generators->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

DrawsFromDevice::DrawsFromDevice(int device) : of_device_(cpu_generator_of(default_generator(device))) {
  static std::mutex mutex;  // ranks that are threads share the CPU's generator
  lock_ = std::unique_lock(mutex);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(cpu.mutex());
  cpu_state_ = cpu.get_state();
  cpu.set_state(of_device_.get_state());
}

DrawsFromDevice::~DrawsFromDevice() {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(cpu.mutex());
  of_device_.set_state(cpu.get_state());
  cpu.set_state(cpu_state_);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  if (generator.device().is_cpu()) return generator;
  return static_cast<const SimGenerator*>(generator.unsafeGetGeneratorImpl())->drawn_by();
}

}  // namespace megashard::sim
