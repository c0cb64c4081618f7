#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// A module that acts once per training step, after the optimizer: e.g. a router whose bias balances its experts
/// (megatron.core: _update_router_expert_bias). Also called for steps that the loss scaler skips.
class EndsSteps {
 public:
  virtual ~EndsSteps() = default;
  /// Takes this rank's counts of the step, fp32 [n] on the model's device; n is the same on all ranks. TrainStep sums
  /// the counts of all modules over the data parallel ranks in one all-reduce.
  virtual at::Tensor take_counts() = 0;
  /// `sums` [n]: the counts of all ranks. Runs without autograd. Must not block the host.
  virtual void end_step(const at::Tensor& sums) = 0;
};

}  // namespace megashard
