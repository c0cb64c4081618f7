#include "parallel/sim/sim_device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "parallel/sim/graph_capture.h"
#include "parallel/sim/host_syncs.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/shuffled_run.h"

namespace megashard::sim {
namespace {

thread_local int device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> stream_of_thread{};

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
  // Gives the event its own time, so that the host can learn of it and of everything before it.
  enqueue(agent);
  event.device = index;
  event.clock = seen_by(agent);
  event.place = recording.mark(agent);
  event.over = timeline.over(agent);
  capture_of(*this).on_record(event, stream);
}

void SimDevice::wait(const Event& event, c10::StreamId stream) {
  if (event.device != index) return;  // never recorded; ranks of one process share no memory
  capture_of(*this).on_wait(event, stream);
  clocks_[static_cast<size_t>(agent_of(stream))].join(event.clock);
  recording.wait(agent_of(stream), event.place);
  timeline.wait(agent_of(stream), event.over);
}

void SimDevice::host_joins(const VectorClock& clock, double over, const char* what) {
  if (what != nullptr) {
    capture_of(*this).refuse(what);
    count_host_sync(what);
  }
  clocks_[kHost].join(clock);
  if (what != nullptr) timeline.host_waits(over);
  end_window();
  PinnedMemory::get().open(index, clocks_[kHost]);
}

void SimDevice::host_waits_for_stream(c10::StreamId stream, const char* what) {
  const int agent = agent_of(stream);
  host_joins(seen_by(agent), timeline.over(agent), what);
}

void SimDevice::host_waits_for_event(const Event& event, const char* what) {
  if (event.device == index) host_joins(event.clock, event.over, what);
}

void SimDevice::host_waits_for_all(const char* what) {
  VectorClock all;
  double over = 0;
  for (int agent = 0; agent < std::ssize(clocks_); ++agent) {
    all.join(seen_by(agent));
    over = std::max(over, timeline.over(agent));
  }
  host_joins(all, over, what);
}

void SimDevice::host_saw(const Event& event) {
  if (event.device == index) host_joins(event.clock, event.over, nullptr);
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

}  // namespace megashard::sim
