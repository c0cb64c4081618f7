#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace megashard {

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
