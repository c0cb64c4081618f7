#include "models/layers/sliding_window.h"

#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>

namespace megashard {

at::Tensor SlidingWindowMask::combined_with(const at::Tensor& attention_mask, int64_t length, c10::Device device) {
  if (window_ == 0 || window_ >= length) return attention_mask;
  if (!mask_.defined() || mask_.size(-1) != length || mask_.device() != device) {
    const c10::InferenceMode no_inference(false);  // it outlives this call, and a training step may use it
    const auto all = at::ones({1, 1, length, length}, at::TensorOptions(at::kBool).device(device));
    mask_ = all.tril().triu(1 - window_);
  }
  return attention_mask.defined() ? attention_mask.logical_and(mask_) : mask_;
}

}  // namespace megashard
