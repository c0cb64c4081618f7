#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <type_traits>
#include <utility>

// Differences between the versions of LibTorch that megashard compiles with, 2.11 to 2.15.

namespace megashard {

/// True: gradients of a unit without reduce_dtype are reduced in the dtype of the stored parameters, as since torch
/// 2.15; false: in the dtype in which the unit computes.
inline constexpr bool kReducesInStoredDtype = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

/// Owning pointer to an autograd node: std::shared_ptr up to torch 2.12, c10::intrusive_ptr from 2.13 on.
using NodePtr = decltype(torch::autograd::Edge::function);

/// Makes a node of type T, a subclass of torch::autograd::Node, in one allocation.
template <class T, class... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  } else {
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  }
}

/// torch::autograd::impl::set_grad_accumulator. Null: the next backward makes a new one.
inline void set_grad_accumulator(const at::Tensor& leaf, const NodePtr& node) {
  using WeakPtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  torch::autograd::impl::set_grad_accumulator(leaf, WeakPtr(node));
}

}  // namespace megashard
