#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// Which keys the queries of a sliding layer see: their own and the window - 1 before it
/// (transformers' sliding_window_causal_mask_function). Made on the device and kept from one forward
/// to the next, for all layers; the host waits for nothing.
class SlidingWindowMask {
 public:
  /// 0: no window.
  explicit SlidingWindowMask(int64_t window) : window_(window) {}
  int64_t window() const { return window_; }

  /// The mask of attention over `length` rows, [1, 1, T, T] bool, or [B, 1, T, T] with one that is given
  /// (true where attention is allowed, undefined: causal). A window that holds the whole sequence
  /// leaves the given one as it is.
  at::Tensor combined_with(const at::Tensor& attention_mask, int64_t length, c10::Device device);

 private:
  int64_t window_;
  at::Tensor mask_;  // [1, 1, T, T], of the last forward
};

}  // namespace megashard
