#pragma once

#include <cstdint>
#include <vector>

namespace megashard::sim {

class SimDevice;

/// Copy of a device's used blocks.
class MemoryImage {
 public:
  struct Part {
    char* address;
    std::vector<char> bytes;
  };

  MemoryImage() = default;
  explicit MemoryImage(const SimDevice& device);

  void restore() const;
  const std::vector<Part>& parts() const { return parts_; }

 private:
  std::vector<Part> parts_;
};

// Second run, if settings().shuffle_seed is not 0. Records what streams run between two waits of the host; at a wait,
// restores memory, runs everything again (each stream is a queue, turns are random) and checks that all memory is
// bit-identical to the first run. Finds accesses that the vector clocks do not know of.

void begin_shuffled_window(SimDevice& device);
void end_shuffled_window(SimDevice& device);
int64_t shuffled_windows();  ///< windows run twice so far, on all devices

}  // namespace megashard::sim
