#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// True if joint_linear can use one product: weights of x's dtype that are adjacent in memory
/// (parallel/fsdp/adjacent_parameters.h).
bool can_join(const at::Tensor& x, at::TensorList weights);

/// linear(x, weight, bias) of fused_ops.h for each weight, as one product, also in backward: x [..., in], weights
/// [out_i, in], biases none or one each. The results [..., out_i] are columns of one tensor, which autograd does not
/// track as views; gradients that are such columns are not copied. The weights' gradients are rows of one tensor.
std::vector<at::Tensor> joint_linear(const at::Tensor& x, at::TensorList weights, at::TensorList biases);

}  // namespace megashard
