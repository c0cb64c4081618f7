#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// linear(swiglu(gate, up), weight, bias) of fused_ops.h, bit for bit, without saving swiglu's result: backward
/// recomputes it for the gradient of the weight [out, in] in the pass that computes those of gate and up [..., in].
/// bias [out] or undefined; returns [..., out].
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const at::Tensor& bias);

}  // namespace megashard
