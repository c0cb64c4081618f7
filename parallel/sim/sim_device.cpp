#include "parallel/sim/sim_device.h"

#include <c10/util/Exception.h>

#include <unordered_set>

#include "parallel/sim/findings.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/host_syncs.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/shuffled_run.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

thread_local int device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> stream_of_thread{};

std::string stream_text(int agent) {
  if (agent == kHost) return "the host";
  return agent == 1 ? "the default stream" : "stream " + std::to_string(agent - 1);
}

}  // namespace

const std::string* interned(const std::string& text) {
  static std::mutex mutex;
  static auto* texts = new std::unordered_set<std::string>;
  const std::lock_guard lock(mutex);
  return &*texts->insert(text).first;
}

int current_device() { return device_of_thread; }
void set_current_device(int index) {
  TORCH_CHECK(0 <= index && index < kDevices, "there is no simulated GPU ", index, ": they count from 0 to ",
              kDevices - 1);
  device_of_thread = index;
}
c10::StreamId current_stream(int device) { return stream_of_thread.at(static_cast<size_t>(device)); }
c10::StreamId exchange_current_stream(int device, c10::StreamId stream) {
  return std::exchange(stream_of_thread.at(static_cast<size_t>(device)), stream);
}

SimDevice& SimDevice::at(int index) {
  static auto* devices = [] {
    auto* made = new std::array<std::unique_ptr<SimDevice>, kDevices>;  // leaked, as the arena
    for (int i = 0; i < kDevices; ++i) (*made)[static_cast<size_t>(i)] = std::make_unique<SimDevice>(i);
    return made;
  }();
  return *devices->at(static_cast<size_t>(index < 0 ? current_device() : index));
}

uint64_t SimDevice::enqueue(int agent) {
  VectorClock& stream = clocks_[static_cast<size_t>(agent)];
  stream.join(clocks_[kHost]);
  return stream.advance(static_cast<size_t>(agent));
}

void SimDevice::record(Event& event, c10::StreamId stream) {
  const int agent = agent_of(stream);
  // An event of its own time: the host may learn of it, and of all before it.
  enqueue(agent);
  event.device = index;
  event.clock = seen_by(agent);
  event.place = recording.mark(agent);
  capture_of(*this).on_record(event, stream);
}

void SimDevice::wait(const Event& event, c10::StreamId stream) {
  if (event.device != index) return;  // never recorded; ranks of one process share no memory
  capture_of(*this).on_wait(event, stream);
  clocks_[static_cast<size_t>(agent_of(stream))].join(event.clock);
  recording.wait(agent_of(stream), event.place);
}

void SimDevice::host_joins(const VectorClock& clock, const char* what) {
  if (what != nullptr) {
    capture_of(*this).refuse(what);
    count_host_sync(what);
  }
  clocks_[kHost].join(clock);
  end_window();
  PinnedMemory::get().open(index, clocks_[kHost]);
}

void SimDevice::host_waits_for_stream(c10::StreamId stream, const char* what) {
  host_joins(clocks_[static_cast<size_t>(agent_of(stream))], what);
}

void SimDevice::host_waits_for_event(const Event& event, const char* what) {
  if (event.device == index) host_joins(event.clock, what);
}

void SimDevice::host_waits_for_all(const char* what) {
  VectorClock all;
  for (const VectorClock& each : clocks_) all.join(each);
  host_joins(all, what);
}

void SimDevice::host_saw(const Event& event) {
  if (event.device == index) host_joins(event.clock, nullptr);
}

bool SimDevice::host_has_seen(const Event& event) const {
  for (size_t agent = 1; agent < clocks_.size(); ++agent) {
    if (event.clock.at(agent) > clocks_[kHost].at(agent)) return false;
  }
  return true;
}

c10::StreamId SimDevice::next_pool_stream(bool high_priority) {
  int& next = next_stream_[high_priority ? 1 : 0];
  const int place = next++ % kPoolStreams;
  return 1 + (high_priority ? kPoolStreams : 0) + place;
}

void SimDevice::end_window() {
  if (capture_of(*this).running()) return;
  end_shuffled_window(*this);
}

Operation::Operation(SimDevice& device, const std::string& name)
    : lock_(device.mutex), device_(device), stream_(current_stream(device.index)) {
  begin_shuffled_window(device_);
  const int agent = agent_of(stream_);
  access_.agent = agent;
  access_.time = device_.enqueue(agent);
  access_.operation = interned(name);
  if (settings().stacks) access_.stack = interned(call_stack());
  capture_of(device_).on_operation(stream_, name);
  ++device_.operations;
}

void Operation::touch(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const std::string* name = name_of_memory(tensor);
  over_runs(tensor, [&](const void* begin, size_t bytes) { touch(begin, bytes, writes, name); });
}

void Operation::touch(const void* begin, size_t bytes, bool writes, const std::string* name) {
  if (bytes == 0 || begin == nullptr) return;
  const int region = Arena::get().region_of(begin);
  if (region < 0) return;
  if (region == Arena::kPinned)
    PinnedMemory::get().close(device_.index, begin, bytes, writes, access_.agent, access_.time, *access_.operation);
  access_.name = name;
  if (device_.recording.on() && region != Arena::kPinned) after_.push_back(device_.pools.handed_out(begin));
  capture_of(device_).on_use(begin, bytes, writes);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const auto tell = [&](const Access& earlier, bool earlier_wrote) { report(earlier, earlier_wrote, writes, name); };
  const VectorClock& seen = device_.seen_by(access_.agent);
  writes ? device_.log.write(address, bytes, access_, seen, tell)
         : device_.log.read(address, bytes, access_, seen, tell);
}

void Operation::report(const Access& earlier, bool earlier_wrote, bool writes, const std::string* name) {
  const auto of = [](const std::string* memory) { return memory == nullptr ? "" : " " + *memory; };
  std::string text = earlier.of_earlier_owner ? "memory was handed out again too early: " : "race: ";
  text += *access_.operation + " on " + stream_text(access_.agent) + (writes ? " writes" : " reads") + of(name) +
          ", and no event orders it after " + *earlier.operation + " on " + stream_text(earlier.agent) + ", which " +
          (earlier_wrote ? "wrote" : "read") + (earlier.of_earlier_owner ? of(earlier.name) + " there" : " it") +
          " (simulated GPU " + std::to_string(device_.index) + ")";
  if (access_.stack != nullptr) text += "\n  now called by" + *access_.stack;
  if (earlier.stack != nullptr) text += "\n  earlier called by" + *earlier.stack;
  found(text);
}

void Operation::run(std::function<void()> work) {
  work();
  recorded(std::move(work));
}

void Operation::recorded(std::function<void()> work) {
  device_.recording.add(access_.agent, *access_.operation, after_, std::move(work));
}

}  // namespace megashard::sim
