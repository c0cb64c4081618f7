#pragma once

#include <chrono>
#include <cstdint>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/saved_arguments.h"

namespace megashard {

/// State of a run that changes from step to step, besides weights, optimizer, schedule and generators. Checkpoints
/// hold it.
struct Progress {
  int64_t step = 0;  ///< completed steps
  int64_t samples = 0;
  int64_t validation_samples = 0;
  double flops = 0;
};

/// The arguments as a checkpoint's args hold them: with the counts of samples, as in Megatron.
inline ArgumentRecord recorded_arguments(const Arguments& arguments, const Progress& progress) {
  ArgumentRecord record = argument_values(arguments);
  for (auto& [name, value] : record) {
    if (name == kConsumedTrainSamples) value = progress.samples;
    if (name == kConsumedValidSamples) value = progress.validation_samples;
  }
  return record;
}

/// When the next line about how far a long work has come is due: neither each turn of a loop, nor
/// silence for long.
class ProgressClock {
 public:
  explicit ProgressClock(std::chrono::milliseconds interval = std::chrono::seconds(5))
      : interval_(interval), last_(Clock::now()) {}

  /// The interval has passed since the last time that this was true, or since the beginning.
  bool is_due() {
    const auto now = Clock::now();
    if (now - last_ < interval_) return false;
    last_ = now;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::milliseconds interval_;
  Clock::time_point last_;
};

}  // namespace megashard
