#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Replaces the tensors that require grad by aliases whose gradients pass through one autograd
/// node, which calls `callback` when the gradients of all of them that backward needs have arrived,
/// and hands them on unchanged. Unlike an autograd::Function it allows in-place changes of views,
/// and unlike a tensor hook it fires for them. Returns whether any tensor required grad. Grad mode
/// must be on.
bool pass_through_node(const char* node_name, TensorRefs tensors, std::function<void()> callback);

}  // namespace megashard
