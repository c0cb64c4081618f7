#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_set>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Parameters of which each of `ranks` has others (experts): what follows is summed over these
/// ranks, too.
struct ExpertParallelInfo {
  ProcessGroupPtr ranks{};  ///< null: there are none
  std::unordered_set<const c10::TensorImpl*> parameters{};
};

/// Norm of the gradients of all parameters as if they were one vector, over all ranks; a 0-d fp32
/// tensor on the parameters' device. Collective: one all-reduce for each group that shards some of
/// the parameters (FSDP's, and the tensor-parallel one); values that replicas share are counted
/// once, and so is a tied parameter that is listed twice. Every rank passes the same parameters;
/// those without a gradient count as zero. Squares are summed in fp64, and the host does not wait for
/// the device. norm_type: any positive number, or infinity for the largest absolute value.
at::Tensor total_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0,
                           const ExpertParallelInfo& parts = {});

/// The same norm of the parameters themselves (megatron's calc_params_l2_norm, over all
/// parameters). Collective.
at::Tensor total_parameter_norm(const std::vector<at::Tensor>& parameters, const ExpertParallelInfo& parts = {});

/// How many elements of the gradients are exactly 0, over all ranks and counted as above; a 0-d
/// fp64 tensor on the parameters' device (megatron's count_zeros_fp32). Collective.
at::Tensor count_zero_gradients(const std::vector<at::Tensor>& parameters, const ExpertParallelInfo& parts = {});

/// max_norm / (norm + 1e-6), at most 1: what clips gradients of that norm; 0-d fp64 on the norm's device.
at::Tensor clip_factor(double max_norm, const at::Tensor& norm);
/// Multiplies gradients by a 0-d fp64 factor on their device.
void multiply_grads_(const std::vector<at::Tensor>& gradients, const at::Tensor& factor);
/// Both (torch's clip_grads_with_norm_).
void clip_grads_with_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& norm);

/// Clips the gradients of all parameters to max_norm, and returns the norm before (torch.nn.utils.clip_grad_norm_
/// over DTensors, megatron's clip_grad_by_total_norm).
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

}  // namespace megashard
