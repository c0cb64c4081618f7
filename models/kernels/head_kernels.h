#pragma once

#include <cstdint>

#include "models/kernels/cpu_kernels.h"

/// RMSNorm over each head and the rotary embedding of what it gives, in one pass over memory; roundings and
/// conventions are those of rms_norm and rotate of cpu_kernels.h, one after the other.
namespace megashard::kernels {

constexpr int64_t kWidestHead = 256;

/// x as RotaryShape says; weight [head_dim]; cos, sin as of rotate. Zero-centred: factors are 1 + weight, and the
/// norm's result is rounded once, as if all had been computed in fp32 and then converted.
template <class T>
struct HeadArrays {
  const T* x;
  const T* weight;
  const T* cos;
  const T* sin;
  bool zero_centered;
};

/// y [batch, length, heads, head_dim], dense; inverse_rms of each head.
template <class T>
void norm_and_rotate(const HeadArrays<T>& of, T* y, float* inverse_rms, const RotaryShape& shape, float eps);

/// grad_y and grad_x are dense; grad_weight [head_dim] is overwritten, and may be null.
template <class T>
void norm_and_rotate_backward(const T* grad_y, const HeadArrays<T>& of, const float* inverse_rms, T* grad_x,
                              float* grad_weight, const RotaryShape& shape);

}  // namespace megashard::kernels
