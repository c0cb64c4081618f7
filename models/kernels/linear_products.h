#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

// Products of a linear layer without autograd, then a layer of two operations with it. The products are in fp32 with
// conversions if linear() uses them (fused_ops.h).

/// True if they are not LibTorch's own products.
bool has_own_linear_products(const at::Tensor& x, const at::Tensor& weight);

/// x W^T + bias; x [..., in], weight [out, in], bias [out] or undefined -> [..., out]
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
/// Converts a gradient once for the next two functions.
at::Tensor widened_for_products(const at::Tensor& grad);
/// grad W; grad [N, out] -> [N, in], in the dtype of the weight
at::Tensor gradient_of_linear_input(const at::Tensor& grad, const at::Tensor& weight);
/// grad^T x; grad [N, out], x [..., in] -> [out, in], in the dtype of x
at::Tensor gradient_of_linear_weight(const at::Tensor& grad, const at::Tensor& x);

/// linear(swiglu(gate, up), weight, bias) of fused_ops.h, bit for bit, without saving swiglu's result: backward
/// recomputes it for the gradient of the weight [out, in] in the pass that computes those of gate and up [..., in].
/// bias [out] or undefined; returns [..., out].
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const at::Tensor& bias);

}  // namespace megashard
