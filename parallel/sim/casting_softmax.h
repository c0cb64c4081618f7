#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace megashard::sim {

/// A softmax of fp16 that returns fp32 is one kernel on CUDA (half_to_float); the CPU has none. Between the two
/// calls the operator runs on the CPU: begin() casts its input first, end() the gradient that it returns.
class CastingSoftmax {
 public:
  /// Other operators, and softmaxes that do not cast, stay as they are.
  static CastingSoftmax begin(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void end(torch::jit::Stack* stack) const;

 private:
  at::Tensor grad_input_;  // of backward's call, which writes into an fp32 one instead
};

}  // namespace megashard::sim
