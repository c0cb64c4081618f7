#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "parallel/device/device_plan.h"

namespace megashard {

template <class Signature>
class DispatchedOperator;

/// An operator of LibTorch's dispatcher by name ("megashard::swiglu"), for which some backends have kernels. Looked up
/// by the constructor.
template <class Result, class... Arguments>
class DispatchedOperator<Result(Arguments...)> {
 public:
  explicit DispatchedOperator(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Arguments...)>()) {}

  /// True if x's backend has a kernel. Then it also has the gradient's.
  bool runs_on(const at::Tensor& x) const {
    const auto key = c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, x.key_set().highestBackendKey());
    // The simulated device also runs the CPU's kernels; a planned device behaves like a GPU.
    return device_is_planned() ? handle_.hasKernelForDispatchKey(key) : handle_.hasComputedKernelForDispatchKey(key);
  }
  Result operator()(Arguments... arguments) const { return handle_.call(std::forward<Arguments>(arguments)...); }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace megashard
