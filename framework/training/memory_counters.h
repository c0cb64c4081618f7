#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "framework/training/memory_log.h"
#include "framework/training/operator_watch.h"

namespace megashard {

/// Memory by class while steps are profiled: looks behind each operator. The thread that makes it trains.
class MemoryCounters {
 public:
  /// `log` outlives it.
  explicit MemoryCounters(const MemoryLog& log);

  /// Adds what it saw to a trace of LibTorch's profiler, as counters "memory" of the Chrome trace format.
  void add_to(const std::string& trace_path) const;

 private:
  struct Sample {
    int64_t at = 0;  // nanoseconds of the system's clock
    MemoryParts parts{};
  };
  void look();

  const MemoryLog& log_;
  std::vector<Sample> samples_;  // each differs from the one before
  OperatorWatch watch_;
};

}  // namespace megashard
