#include "models/kernels/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>

#include "models/kernels/column_parts.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/grouped_products.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"
#include "parallel/fsdp/adjacent_parameters.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

GroupMatrices matrices_of(at::TensorList weights, int64_t groups) {
  auto whole = adjacent_matrix(weights);
  const bool one_each = static_cast<int64_t>(weights.size()) == groups;
  if (!whole.defined() && one_each && weights[0].is_cpu()) return {.stacked = {}, .single = weights};
  if (!whole.defined()) whole = at::cat(weights);
  return {.stacked = whole.view({groups, -1, whole.size(1)}), .single = {}};
}

/// Sets the gradients of the weights, which are a function's inputs from `first` on.
void give_weight_gradients(AutogradContext* context, variable_list& results, size_t first, at::TensorList weights,
                           const at::Tensor& grad, const at::Tensor& x, RowGroups& groups) {
  std::vector<size_t> trained;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (context->needs_input_grad(first + i)) trained.push_back(i);
  }
  if (trained.empty()) return;
  const auto whole = grouped_gradient_of_weight(grad, x, groups).view({-1, x.size(1)});
  const auto parts = parts_of(whole, 0, std::vector<int64_t>(weights.size(), weights[0].size(0)));
  for (const size_t i : trained) results[first + i] = parts[i];
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                               const RowGroupsPtr& groups) {
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    const auto each = static_cast<int64_t>(weights.size()) / groups->size();
    const auto y = grouped_product(x, matrices_of(weights, groups->size()), *groups);
    return parts_of(y, -1, std::vector<int64_t>(static_cast<size_t>(each), weights[0].size(0)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto weights = at::TensorList(saved).slice(1);
    const auto grad = joined_columns(grads);
    variable_list results(2 + weights.size());
    if (context->needs_input_grad(0))
      results[0] = grouped_gradient_of_input(grad, matrices_of(weights, groups.size()), groups);
    give_weight_gradients(context, results, 1, weights, grad, x, groups);
    return results;
  }
};

struct GroupedSwigluLinear : torch::autograd::Function<GroupedSwigluLinear> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in,
                          at::TensorList weights, const RowGroupsPtr& groups) {
    const auto [gate, up] = in_one_layout(gate_in, up_in);
    variable_list saved{gate, up};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    return grouped_product(fused_operators().swiglu(gate, up), matrices_of(weights, groups->size()), *groups);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_swiglu_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto weights = at::TensorList(saved).slice(2);
    const auto grad = joined_columns(grads);
    variable_list results(3 + weights.size());
    auto product = grouped_gradient_of_input(grad, matrices_of(weights, groups.size()), groups).contiguous();
    std::tie(results[0], results[1]) = fused_operators().swiglu_backward_(product, saved[0], saved[1]);
    give_weight_gradients(context, results, 2, weights, grad, product, groups);
    return results;
  }
};

}  // namespace

bool can_group(const at::Tensor& x, at::TensorList weights, int64_t groups) {
  const auto& first = weights[0];
  const bool alike = std::all_of(weights.begin(), weights.end(), [&](const at::Tensor& weight) {
    return weight.sizes() == first.sizes() && weight.scalar_type() == x.scalar_type() && weight.device() == x.device();
  });
  const auto each = static_cast<int64_t>(weights.size()) / groups;
  if (!alike || (!x.is_cpu() && !has_grouped_kernel(x, {each * first.size(0), first.size(1)}, groups))) return false;
  return (x.is_cpu() && each == 1) || adjacent_matrix(weights).defined();
}

std::vector<at::Tensor> grouped_linear(const at::Tensor& x, at::TensorList weights, const RowGroupsPtr& groups) {
  return GroupedLinear::apply(x, weights, groups);
}

at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, at::TensorList weights,
                                 const RowGroupsPtr& groups) {
  if (!has_kernel(fused_operators().swiglu, gate)) return grouped_linear(swiglu(gate, up), weights, groups)[0];
  return GroupedSwigluLinear::apply(gate, up, weights, groups);
}

}  // namespace megashard
