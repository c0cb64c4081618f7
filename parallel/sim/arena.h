#pragma once

#include <cstddef>
#include <cstdint>

namespace megashard::sim {

constexpr int kDevices = 8;
constexpr size_t kRegionBytes = size_t{2} << 40;  ///< address space; pages are allocated when touched

/// Address space of all devices and of pinned host memory. Each page is mapped twice: at the program's address, where
/// the host may not access device memory, and at its mirror, which the simulator reads and writes.
class Arena {
 public:
  static constexpr int kPinned = kDevices;  ///< the region of pinned memory

  static Arena& get();

  /// Region of an address; -1 for unpinned host memory.
  int region_of(const void* address) const;
  char* mirror(const void* address) const { return const_cast<char*>(static_cast<const char*>(address)) + to_mirror_; }
  /// Mirror of an arena address; any other address is returned as it is.
  char* reachable(const void* address) const {
    return region_of(address) >= 0 ? mirror(address) : const_cast<char*>(static_cast<const char*>(address));
  }

  /// Allocates unused or freed addresses, aligned to 2 MiB; null if the region is full.
  char* take(int region, size_t bytes);
  void give_back(char* address, size_t bytes);  ///< returns the pages to the system

 private:
  Arena();

  char* begin_ = nullptr;
  ptrdiff_t to_mirror_ = 0;
  int file_ = -1;
  size_t used_[kDevices + 1] = {};
};

}  // namespace megashard::sim
