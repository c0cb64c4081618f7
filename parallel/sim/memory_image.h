#pragma once

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

}  // namespace megashard::sim
