#pragma once

#include <ATen/core/Tensor.h>

/// Products of a linear layer, without autograd; in fp32 with conversions if linear() uses them (fused_ops.h).
namespace megashard {

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

}  // namespace megashard
