#pragma once

#include <algorithm>

#include "tests/support/observed_allocator.h"

namespace megashard::testing {

/// Counts the bytes that tensors hold, until stop(). For tests of one thread.
class CountingAllocator final : public ObservedAllocator {
 public:
  void reset_peak() { peak_ = live_; }
  size_t live() const { return live_; }
  size_t peak() const { return peak_; }

 private:
  Freed allocated(size_t bytes) override {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    return [this, bytes] { live_ -= bytes; };
  }

  size_t live_ = 0, peak_ = 0;
};

}  // namespace megashard::testing
