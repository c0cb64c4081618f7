#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace megashard::sim {

/// Calls an operator on the meta device, whose tensors are on the stack already: what it returns has
/// sizes and no values. What the host would read is 1 (docs/plan.md). Throws one sentence for
/// operators whose results' sizes depend on values.
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// A tensor of the meta device with the sizes of one of the simulated device, and with a storage of
/// its own.
at::Tensor meta_alias(const at::Tensor& tensor);

/// Bytes that the elements of a tensor take; an expanded one's once.
int64_t bytes_of_elements(const at::Tensor& tensor);

}  // namespace megashard::sim
