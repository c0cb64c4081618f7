#pragma once

#include <c10/core/Device.h>

#include <functional>

namespace megashard {

/// Times work on a device, which it waits for.
class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device) {}

  /// Of one call: the median of a few rounds, each of as many calls as take a fiftieth of a second.
  double seconds_of(const std::function<void()>& work) const;
  /// Of one of so many calls, after a first one.
  double seconds_of(int calls, const std::function<void()>& work) const;

 private:
  c10::Device device_;
};

}  // namespace megashard
