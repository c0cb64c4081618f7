#include "parallel/sim/shuffled_run.h"

#include <array>
#include <atomic>
#include <cstring>
#include <exception>

#include "parallel/sim/findings.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/settings.h"
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

namespace {

std::array<MemoryImage, kDevices>& images_before() {
  static auto* each = new std::array<MemoryImage, kDevices>;
  return *each;
}
std::atomic<int64_t> windows{0};

/// First byte that differs from the first run; null if none.
const char* first_difference(const char* now, const char* first_run, size_t bytes) {
  if (std::memcmp(now, first_run, bytes) == 0) return nullptr;
  while (*now == *first_run) ++now, ++first_run;
  return now;
}

void compare(SimDevice& device, const MemoryImage& first_run) {
  const Arena& arena = Arena::get();
  for (const auto& part : first_run.parts()) {
    const char* now = arena.mirror(part.address);
    const auto address = reinterpret_cast<uintptr_t>(part.address);
    device.log.settled(
        address, part.bytes.size(), device.recording.window(),
        [&](uintptr_t begin, size_t bytes, const Access& writer) {
          if (first_difference(now + (begin - address), part.bytes.data() + (begin - address), bytes) == nullptr)
            return;
          found("in another legal order " + (writer.operation == nullptr ? "an operation" : *writer.operation) +
                " on stream " + std::to_string(writer.agent - 1) + " leaves other bits (simulated GPU " +
                std::to_string(device.index) + ", seed " + std::to_string(settings().shuffle_seed) +
                "): something that it uses is not ordered before it" +
                (writer.stack == nullptr ? "" : "\n  called by" + *writer.stack));
        });
  }
}

}  // namespace

int64_t shuffled_windows() { return windows; }

void begin_shuffled_window(SimDevice& device) {
  if (settings().shuffle_seed == 0 || device.recording.on() || capture_of(device).running()) return;
  images_before()[static_cast<size_t>(device.index)] = MemoryImage(device);
  device.recording.start();
}

void end_shuffled_window(SimDevice& device) {
  if (settings().shuffle_seed == 0 || !device.recording.on()) return;
  const bool streams_differ = device.recording.has_several_streams();
  if (streams_differ) {
    const MemoryImage first_run(device);
    images_before()[static_cast<size_t>(device.index)].restore();
    try {
      device.recording.run_in_random_order(settings().shuffle_seed);
      compare(device, first_run);
    } catch (const std::exception& error) {
      found(std::string("in another legal order an operation fails: ") + error.what());
    }
    first_run.restore();
    ++windows;
  }
  images_before()[static_cast<size_t>(device.index)] = {};
  device.recording.stop();
}

}  // namespace megashard::sim
