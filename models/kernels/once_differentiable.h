#pragma once

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace megashard {

/// Call it first in the backward of a function without second derivative (PyTorch's once_differentiable): throws if
/// backward itself is recorded.
inline void require_once_differentiated(const char* name) {
  TORCH_CHECK(!c10::GradMode::is_enabled(), name,
              " has no second derivative: call backward without create_graph, or compute it with plain operators");
}

}  // namespace megashard
