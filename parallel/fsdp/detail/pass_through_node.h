#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Replaces the tensors that require grad by aliases whose gradients pass unchanged through one autograd node. The node
/// calls `callback` once all gradients that backward needs of them have arrived. Unlike an autograd::Function, it
/// allows in-place changes of views, and unlike a tensor hook, it fires for them. Returns true if any tensor required
/// grad. Needs grad mode.
bool pass_through_node(const char* node_name, TensorRefs tensors, std::function<void()> callback);

}  // namespace megashard
