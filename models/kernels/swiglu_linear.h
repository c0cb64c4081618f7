#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// linear(swiglu(gate, up), weight, bias) of fused_ops.h, bit for bit, without keeping swiglu's result: the pass of
/// backward that has the gradients of gate and up [..., in] makes it again for that of the weight [out, in]. bias [out]
/// or undefined; returns [..., out].
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const at::Tensor& bias);

}  // namespace megashard
