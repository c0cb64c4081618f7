#include "models/kernels/grouped_linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/grouped_products.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// [groups, out, in] as one part per group.
at::Tensor with_parts(const at::Tensor& weight) { return weight.dim() == 3 ? weight.unsqueeze(1) : weight; }

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                               const RowGroupsPtr& groups) {
    context->save_for_backward({x, weight});
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    return grouped_product(x, with_parts(weight), *groups);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    variable_list results(3);
    if (context->needs_input_grad(0)) results[0] = grouped_gradient_of_input(grads, with_parts(weight), groups);
    if (context->needs_input_grad(1)) results[1] = grouped_gradient_of_weight(grads, x, groups).view(weight.sizes());
    return results;
  }
};

struct GroupedSwigluLinear : torch::autograd::Function<GroupedSwigluLinear> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in,
                          const at::Tensor& weight, const RowGroupsPtr& groups) {
    const auto [gate, up] = in_one_layout(gate_in, up_in);
    context->save_for_backward({gate, up, weight});
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    return grouped_product(fused_operators().swiglu(gate, up), with_parts(weight), *groups)[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_swiglu_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& weight = saved[2];
    variable_list results(4);
    auto product = grouped_gradient_of_input(grads, with_parts(weight), groups).contiguous();
    std::tie(results[0], results[1]) = fused_operators().swiglu_backward_(product, saved[0], saved[1]);
    if (context->needs_input_grad(2)) results[2] = grouped_gradient_of_weight(grads, product, groups).squeeze(1);
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroupsPtr& groups) {
  return GroupedLinear::apply(x, weight, groups);
}

at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                                 const RowGroupsPtr& groups) {
  if (!has_kernel(fused_operators().swiglu, gate)) return grouped_linear(swiglu(gate, up), weight, groups)[0];
  return GroupedSwigluLinear::apply(gate, up, weight, groups);
}

}  // namespace megashard
