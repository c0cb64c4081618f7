#pragma once

#include <cstdint>

#include "models/kernels/cpu_kernels.h"

/// RMSNorm over each head followed by the rotary embedding, in one pass over memory. Rounds as rms_norm and then rotate
/// in cpu_kernels.h.
namespace megashard::kernels {

constexpr int64_t kWidestHead = 256;

/// x as in RotaryShape; weight [head_dim]; cos, sin as in rotate. Zero-centred: multiplies by 1 + weight and rounds the
/// norm's result once, as if computed in fp32 and then converted.
template <class T>
struct HeadArrays {
  const T* x;
  const T* weight;
  const T* cos;
  const T* sin;
  bool zero_centered;
};

/// y [batch, length, heads, head_dim], contiguous; inverse_rms per head.
template <class T>
void norm_and_rotate(const HeadArrays<T>& of, T* y, float* inverse_rms, const RotaryShape& shape, float eps);

/// grad_y and grad_x are contiguous; overwrites grad_weight [head_dim], which may be null.
template <class T>
void norm_and_rotate_backward(const T* grad_y, const HeadArrays<T>& of, const float* inverse_rms, T* grad_x,
                              float* grad_weight, const RotaryShape& shape);

}  // namespace megashard::kernels
