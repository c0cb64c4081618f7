#include "parallel/sim/casting_softmax.h"

#include <ATen/ops/empty_like.h>

namespace megashard::sim {

CastingSoftmax CastingSoftmax::begin(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CastingSoftmax softmax;
  const c10::FunctionSchema& schema = op.schema();
  if (schema.overload_name() != "out") return softmax;  // LibTorch's other overloads call this one
  const auto argument = [&](size_t index) -> c10::IValue& {
    return (*stack)[stack->size() - schema.arguments().size() + index];
  };
  const std::string& name = schema.name();
  if (name == "aten::_softmax" || name == "aten::_log_softmax") {  // (self, dim, half_to_float, out)
    if (!argument(2).toBool()) return softmax;
    argument(0) = argument(0).toTensor().to(at::kFloat);
    argument(2) = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    // (grad_output, output, dim, input_dtype, grad_input)
    const at::ScalarType input = argument(3).toScalarType(), output = argument(1).toTensor().scalar_type();
    if (input == output) return softmax;
    softmax.grad_input_ = argument(4).toTensor();
    argument(3) = output;
    argument(4) = at::empty_like(softmax.grad_input_, softmax.grad_input_.options().dtype(output));
  }
  return softmax;
}

void CastingSoftmax::end(torch::jit::Stack* stack) const {
  if (!grad_input_.defined()) return;
  grad_input_.copy_(stack->back().toTensor());
  stack->back() = grad_input_;
}

}  // namespace megashard::sim
