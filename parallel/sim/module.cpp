// Exports of the module: the same table as libmegashard_cuda.so, and the simulated device itself for tests.

#include "parallel/sim/sim_module.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <unistd.h>

#include "parallel/device/cuda_module.h"
#include "parallel/sim/device_allocator.h"
#include "parallel/sim/findings.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/host_syncs.h"
#include "parallel/sim/kernels.h"
#include "parallel/sim/operation.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/process_group.h"
#include "parallel/sim/shuffled_run.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

int device_count() { return kDevices; }
void set_device(int index) { set_current_device(index); }
std::string device_name(int /*index*/) { return "simulated GPU"; }
std::string device_identity(int index) { return c10::str("simulated GPU ", index, " of process ", ::getpid()); }
at::Tensor pinned_bytes(int64_t bytes) {
  auto memory = PinnedMemory::get().allocate_exactly(static_cast<size_t>(bytes));
  void* address = memory.release_context();
  return at::from_blob(address, {bytes}, memory.get_deleter(), at::TensorOptions(at::kByte));
}

std::vector<std::string> findings_of_all() {
  for (int index = 0; index < kDevices; ++index) {
    SimDevice& device = SimDevice::at(index);
    const std::lock_guard lock(device.mutex);
    device.end_window();
  }
  return take_findings();
}

Counts counts() {
  Counts result{.operations = 0,
                .collectives = 0,
                .collective_bytes = 0,
                .shuffled_windows = shuffled_windows(),
                .pinned_bytes = static_cast<int64_t>(PinnedMemory::get().bytes_in_use())};
  for (int index = 0; index < kDevices; ++index) {
    SimDevice& device = SimDevice::at(index);
    const std::lock_guard lock(device.mutex);
    result.operations += device.operations;
    result.collectives += device.collectives;
    result.collective_bytes += device.collective_bytes;
  }
  return result;
}

std::string what_was_checked() {
  const Counts checked = counts();
  return c10::str(checked.operations, " operations on streams, ", checked.collectives, " collectives of ",
                  checked.collective_bytes, " bytes, ", checked.shuffled_windows,
                  " windows run again in another order");
}

void* capture(void (*work)(void*), void* argument) {
  SimDevice& device = SimDevice::at(current_device());
  const c10::StreamId stream = current_stream(device.index);
  TORCH_CHECK(stream != 0, "CUDA graphs are captured on another stream than the default one: make one current");
  {
    const std::lock_guard lock(device.mutex);
    capture_of(device).begin(stream);
  }
  const auto end = [&] {
    const std::lock_guard lock(device.mutex);
    return capture_of(device).end();
  };
  try {
    work(argument);
  } catch (...) {
    try {
      end();
    } catch (const std::exception&) {
      // The exception of `work` says more.
    }
    throw;
  }
  return end().release();
}
void replay_graph(void* graph) { replay(*static_cast<Graph*>(graph)); }
void free_graph(void* graph) { delete static_cast<Graph*>(graph); }

// A plan covers one rank, on the first device.
void begin_plan(const DeviceModel& model, bool keeps_spans) {
  settings().shapes = true;
  settings().model = model;
  settings().capacity = kRegionBytes;  // excess memory is reported with its size
  DeviceAllocator::get().emptyCache({});
  DeviceAllocator::get().resetPeakStats(0);
  SimDevice& device = SimDevice::at(0);
  const std::lock_guard lock(device.mutex);
  device.pools.forget_resident();
  device.timeline = {};
  device.timeline.keep_spans(keeps_spans);
}
PlanTotals take_totals() {
  SimDevice& device = SimDevice::at(0);
  const std::lock_guard lock(device.mutex);
  return device.timeline.take_totals();
}
void host_passes(int64_t bytes) {
  SimDevice& device = SimDevice::at(0);
  const std::lock_guard lock(device.mutex);
  device.timeline.host_works(static_cast<double>(bytes) / settings().model.host_memory_bandwidth);
}
void observe_peak(std::function<void(const std::string&, int64_t)> observer) {
  SimDevice& device = SimDevice::at(0);
  const std::lock_guard lock(device.mutex);
  if (!observer) return device.pools.on_peak(nullptr);
  device.pools.on_peak([&device, observer = std::move(observer)](int64_t bytes) {
    observer(device.running == nullptr ? "allocation" : *device.running, bytes);
  });
}

void register_device() {
  static const bool once = [] {
    c10::SetAllocator(c10::kCUDA, &DeviceAllocator::get());
    at::setHostAllocator(c10::kCUDA, &PinnedMemory::get());
    watch_unit_scopes();
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace
}  // namespace megashard::sim

// Looked up by name in load_cuda_module().
extern "C" void megashard_cuda_module(megashard::CudaModule* module) {
  namespace sim = megashard::sim;
  sim::register_device();
  *module = {.device_count = sim::device_count,
             .set_device = sim::set_device,
             .device_name = sim::device_name,
             .device_identity = sim::device_identity,
             .pinned_bytes = sim::pinned_bytes,
             .make_nccl_group = sim::make_process_group,
             .take_findings = sim::findings_of_all,
             .what_was_checked = sim::what_was_checked,
             .log_host_syncs = sim::log_host_syncs,
             .take_host_syncs = sim::take_host_syncs,
             .kernels = sim::kernels_of_module(),
             .plan = {.begin = sim::begin_plan,
                      .take_totals = sim::take_totals,
                      .observe_peak = sim::observe_peak,
                      .host_passes = sim::host_passes}};
}

// Looked up by name in tests.
extern "C" void megashard_sim_module(megashard::sim::SimModule* module) {
  namespace sim = megashard::sim;
  *module = {.settings = &sim::settings,
             .counts = sim::counts,
             .capture_graph = sim::capture,
             .replay_graph = sim::replay_graph,
             .free_graph = sim::free_graph};
}
