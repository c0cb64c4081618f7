#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>
#include <string>

#include "parallel/sim/vector_clock.h"

namespace megashard::sim {

/// Pinned host memory for asynchronous copies. While such a copy may still run, its pages are protected: against host
/// writes if the copy reads, against any host access if it writes. An access is reported as a finding and continues.
class PinnedMemory final : public at::HostAllocator {
 public:
  static PinnedMemory& get();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DataPtr allocate_exactly(size_t bytes);  ///< whole pages; not reused when freed
  size_t bytes_in_use() const;                  ///< after rounding
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
  bool record_event(void* ptr, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  bool holds(const void* address) const;
  /// A copy of this device was enqueued: protects the bytes until the host has seen `time` of `agent`.
  void close(int device, const void* begin, size_t bytes, bool copy_writes, int agent, uint64_t time,
             const std::string& operation);
  /// Unprotects what the device's host has seen, according to `seen`.
  void open(int device, const VectorClock& seen);
};

}  // namespace megashard::sim
