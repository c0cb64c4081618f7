#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace megashard::sim {

/// CUDA has one kernel for a softmax from fp16 to fp32 (half_to_float); the CPU has none. The operator runs on the CPU
/// between the two calls: begin() casts its input, end() the gradient that it returns.
class CastingSoftmax {
 public:
  /// No effect on other operators and on softmaxes without a cast.
  static CastingSoftmax begin(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void end(torch::jit::Stack* stack) const;

 private:
  at::Tensor grad_input_;  // backward's output; an fp32 tensor is written instead
};

}  // namespace megashard::sim
