#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

namespace megashard::detail {

/// What a tape must know of an operator that its schema does not say.

/// In-place, and leaves nothing of self.
bool fills_self(const c10::OperatorHandle& op);
bool only_allocates(const c10::OperatorHandle& op);
/// torch::tensor({...}) allocates with autograd excluded, then writes the bytes itself: its result
/// is a real constant. To be asked while the operator is being called.
bool is_literal(const c10::OperatorHandle& op);
/// In-place by schema, but the bytes stay.
bool changes_autograd_only(const c10::OperatorHandle& op);

/// Calls `visit` with each defined tensor in an argument or result.
void visit_ivalue_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);
bool is_tensor_list(const c10::IValue& value);
/// The value with meta tensors of the same geometry for real ones, for meta kernels that get both.
c10::IValue meta_twin(const c10::IValue& value);

}  // namespace megashard::detail
