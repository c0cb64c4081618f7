#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Whether joint_linear has one product for them: weights of x's dtype that lie one after the other in memory
/// (parallel/fsdp/adjacent_parameters.h).
bool can_join(const at::Tensor& x, at::TensorList weights);

/// linear(x, weight, bias) of fused_ops.h for each, as one product, and so its gradients: x [..., in], weights [out_i,
/// in], biases none or one each. The results [..., out_i] are columns of one tensor, without autograd's knowledge that
/// they are; where their gradients come as such columns too, these are not copied. The weights' gradients are rows of
/// one tensor.
std::vector<at::Tensor> joint_linear(const at::Tensor& x, at::TensorList weights, at::TensorList biases);

}  // namespace megashard
