#pragma once

#include <chrono>

namespace megashard {

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
