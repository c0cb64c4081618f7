#pragma once

#include <c10/core/Device.h>

#include <functional>

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

}  // namespace megashard
