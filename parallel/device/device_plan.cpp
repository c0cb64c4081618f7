#include "parallel/device/device_plan.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

std::atomic<bool> planned{false}, planned_cpu{false};

}  // namespace

DevicePlan begin_device_plan(const DeviceModel& model, bool keeps_spans) {
  use_simulated_device();
  const DevicePlan plan = load_cuda_module().plan;
  TORCH_CHECK(plan.begin != nullptr, "the simulated device of this build makes no plans; build again");
  plan.begin(model, keeps_spans);
  planned = true;
  planned_cpu = model.program_memory > 0;
  return plan;
}

bool plan_host_pass(int64_t bytes) {
  if (planned) load_cuda_module().plan.host_passes(bytes);
  return planned;
}

bool device_is_planned() { return planned; }

bool acts_as_cpu(c10::Device device) { return device.is_cpu() || planned_cpu; }

}  // namespace megashard
