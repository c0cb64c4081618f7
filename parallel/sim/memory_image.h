#pragma once

#include <vector>

namespace megashard::sim {

class SimDevice;

/// A copy of all memory that a device's pools hold.
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
  const Part* part_at(const char* address) const;  ///< null: this memory was taken later

 private:
  std::vector<Part> parts_;
};

}  // namespace megashard::sim
