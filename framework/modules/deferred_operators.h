#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

namespace megashard::detail {

/// Properties of operators that the tape needs and their schemas lack.

/// True for in-place operators that overwrite all of self.
bool fills_self(const c10::OperatorHandle& op);
bool only_allocates(const c10::OperatorHandle& op);
/// True for torch::tensor({...}), which allocates with autograd excluded and then writes the bytes itself: its result
/// is a real constant. Call it during the operator's call.
bool is_literal(const c10::OperatorHandle& op);
/// True for operators that are in-place by schema but do not change data.
bool changes_autograd_only(const c10::OperatorHandle& op);

/// Calls `visit` with each defined tensor in an argument or result.
void visit_ivalue_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);
bool is_tensor_list(const c10::IValue& value);
/// Replaces real tensors by meta tensors of the same geometry, for meta kernels that receive both.
c10::IValue meta_twin(const c10::IValue& value);

}  // namespace megashard::detail
