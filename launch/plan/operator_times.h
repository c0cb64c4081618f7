#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "parallel/device/device_plan.h"

namespace megashard {

/// Measures the time of work on a device, which it synchronises with.
class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device) {}

  /// Seconds per call: the median of a few rounds, each with calls for 1/50 second.
  double seconds_of(const std::function<void()>& work) const;
  /// Seconds per call, averaged over `calls` after a first one.
  double seconds_of(int calls, const std::function<void()>& work) const;

 private:
  c10::Device device_;
};

/// Measures the share of the matrix product's FLOP/s that causal attention reaches, for device files.
void measure_attention(DeviceModel& model, const Stopwatch& watch, c10::Device device);

/// Measures the bytes per second of non-matmul operators of models and optimizers on a CPU, by their names in a plan.
void measure_operators(DeviceModel& model, const Stopwatch& watch);

}  // namespace megashard
