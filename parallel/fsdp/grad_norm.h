#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Norm over all gradients as one vector, over all ranks; a 0-d fp32 tensor on the parameters' device. Collective: one
/// all-reduce per group that shards some parameters (FSDP, tensor and expert parallelism). Replicated values and tied
/// parameters that are listed twice count once. Every rank passes the same parameters; those without a gradient count
/// as zero. Squares are summed in fp64. Does not block the host on the device. norm_type: positive, or infinity for the
/// largest absolute value.
at::Tensor total_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// The same norm over the parameters themselves (Megatron's calc_params_l2_norm, over all parameters). Collective.
at::Tensor total_parameter_norm(const std::vector<at::Tensor>& parameters);

/// Number of gradient elements that are exactly 0, over all ranks, counted as in total_grad_norm; a 0-d fp64 tensor on
/// the parameters' device (Megatron's count_zeros_fp32). Collective.
at::Tensor count_zero_gradients(const std::vector<at::Tensor>& parameters);

/// Clipping factor min(1, max_norm / (norm + 1e-6)); 0-d fp64 on the norm's device.
at::Tensor clip_factor(double max_norm, const at::Tensor& norm);
/// Multiplies gradients by a 0-d fp64 factor on their device.
void multiply_grads_(const std::vector<at::Tensor>& gradients, const at::Tensor& factor);
/// multiply_grads_ by clip_factor (torch's clip_grads_with_norm_).
void clip_grads_with_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& norm);

/// Clips the gradients of all parameters to max_norm and returns the norm before clipping
/// (torch.nn.utils.clip_grad_norm_ over DTensors, Megatron's clip_grad_by_total_norm). Collective.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

}  // namespace megashard
