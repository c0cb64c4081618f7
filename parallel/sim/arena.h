#pragma once

#include <cstddef>
#include <cstdint>

namespace megashard::sim {

constexpr int kDevices = 8;
constexpr size_t kRegionBytes = size_t{2} << 40;  ///< of addresses; pages come when they are touched

/// Addresses of all devices and of pinned host memory. Each page is mapped twice: at the address
/// that the program sees, where the host may not touch a device's memory, and at its mirror,
/// through which the simulator reads and writes.
class Arena {
 public:
  static constexpr int kPinned = kDevices;  ///< the region of pinned memory

  static Arena& get();

  /// Region of an address, or -1 for memory of the host that is not pinned.
  int region_of(const void* address) const;
  char* mirror(const void* address) const { return const_cast<char*>(static_cast<const char*>(address)) + to_mirror_; }
  /// The mirror of an address of the arena; any other address itself.
  char* reachable(const void* address) const {
    return region_of(address) >= 0 ? mirror(address) : const_cast<char*>(static_cast<const char*>(address));
  }

  /// Addresses that were never taken before, or given back, aligned to 2 MiB; null: the region is
  /// full.
  char* take(int region, size_t bytes);
  void give_back(char* address, size_t bytes);  ///< the pages go back to the system

 private:
  Arena();

  char* begin_ = nullptr;
  ptrdiff_t to_mirror_ = 0;
  int file_ = -1;
  size_t used_[kDevices + 1] = {};
};

}  // namespace megashard::sim
