#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace megashard::sim {

/// Calls an operator on the meta device, with its tensors already on the stack: results have sizes but no values.
/// Values read by the host are 1 (docs/plan.md). Throws for operators whose result sizes depend on values.
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// A meta tensor with the sizes of a simulated device's tensor and its own storage.
at::Tensor meta_alias(const at::Tensor& tensor);

/// Bytes of a tensor's elements; expanded ones count once.
int64_t bytes_of_elements(const at::Tensor& tensor);

}  // namespace megashard::sim
