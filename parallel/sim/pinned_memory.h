#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>
#include <string>

#include "parallel/sim/vector_clock.h"

namespace megashard::sim {

/// Host memory that a device copies from and to without the host waiting. While such a copy may
/// still run, the pages are closed to the host: to writes where the copy reads, to everything where
/// it writes. Who touches them is found, and goes on.
class PinnedMemory final : public at::HostAllocator {
 public:
  static PinnedMemory& get();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DataPtr allocate_exactly(size_t bytes);  ///< whole pages; not kept for others when freed
  size_t bytes_in_use() const;                  ///< as rounded
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
  bool record_event(void* ptr, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  bool holds(const void* address) const;
  /// A copy of this device was enqueued; the host may not touch the bytes until it knows `time` of
  /// `agent`.
  void close(int device, const void* begin, size_t bytes, bool copy_writes, int agent, uint64_t time,
             const std::string& operation);
  /// The host of the device knows what `seen` says.
  void open(int device, const VectorClock& seen);
};

}  // namespace megashard::sim
