#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "parallel/device/device_plan.h"

namespace megashard {

template <class Signature>
class DispatchedOperator;

/// An operator of LibTorch's dispatcher by its name ("megashard::swiglu"), for which a backend has a kernel or not;
/// looked up when this is made.
template <class Result, class... Arguments>
class DispatchedOperator<Result(Arguments...)> {
 public:
  explicit DispatchedOperator(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Arguments...)>()) {}

  /// Whether x's backend runs it; a backend that does runs its gradient, too.
  bool runs_on(const at::Tensor& x) const {
    const auto key = c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, x.key_set().highestBackendKey());
    // The simulated device runs the CPU's kernels, too, and a planned one is like a GPU.
    return device_is_planned() ? handle_.hasKernelForDispatchKey(key) : handle_.hasComputedKernelForDispatchKey(key);
  }
  Result operator()(Arguments... arguments) const { return handle_.call(std::forward<Arguments>(arguments)...); }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace megashard
