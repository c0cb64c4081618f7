#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "framework/training/metrics.h"

namespace megashard {

/// A file of the first rank that metrics go to.
class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;
  /// Throws std::runtime_error when it could not be written (a full disk).
  virtual void write(const StepReport& report) = 0;
};
using MetricsWriters = std::vector<std::unique_ptr<MetricsWriter>>;

/// Those that the arguments ask for, of a run that goes on after `loaded_step` (0: a fresh one). Throws UsageError for
/// one that cannot be written.
MetricsWriters make_metrics_writers(const Arguments& arguments, int64_t loaded_step);

/// Whether one of them takes that step, so that the host must know its numbers when it ends.
bool writers_take(const Arguments& arguments, int64_t iteration);

}  // namespace megashard
