#include "models/kernels/joint_linear.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/column_parts.h"
#include "models/kernels/linear_products.h"
#include "models/kernels/once_differentiable.h"
#include "parallel/fsdp/adjacent_parameters.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::vector<int64_t> widths_of(at::TensorList weights) {
  std::vector<int64_t> widths;
  for (const auto& weight : weights) widths.push_back(weight.size(0));
  return widths;
}

struct JointLinear : torch::autograd::Function<JointLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                               at::TensorList biases) {
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["biases"] = !biases.empty();
    const auto bias = biases.empty() ? at::Tensor() : at::cat(biases);
    return parts_of(linear_product(x, adjacent_matrix(weights), bias), -1, widths_of(weights));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("joint_linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto weights = at::TensorList(saved).slice(1);
    const bool has_biases = context->saved_data["biases"].toBool();
    const auto joined = joined_columns(grads);
    const auto grad = widened_for_products(joined);
    const auto needs = [&](size_t first) {
      bool any = false;
      for (size_t i = 0; i < weights.size(); ++i) any |= context->needs_input_grad(first + i);
      return any;
    };
    variable_list results(1 + weights.size() * (has_biases ? 2 : 1));
    if (context->needs_input_grad(0)) {
      const auto whole = adjacent_matrix(weights);
      results[0] = gradient_of_linear_input(grad, whole.defined() ? whole : at::cat(weights)).view(x.sizes());
    }
    const auto give = [&](size_t first, const at::Tensor& whole) {
      const auto parts = parts_of(whole, 0, widths_of(weights));
      for (size_t i = 0; i < parts.size(); ++i) {
        if (context->needs_input_grad(first + i)) results[first + i] = parts[i];
      }
    };
    if (needs(1)) give(1, gradient_of_linear_weight(grad, x));
    if (has_biases && needs(1 + weights.size())) give(1 + weights.size(), joined.sum(0));
    return results;
  }
};

}  // namespace

bool can_join(const at::Tensor& x, at::TensorList weights) {
  return x.scalar_type() == weights[0].scalar_type() && x.device() == weights[0].device() &&
         adjacent_matrix(weights).defined();
}

std::vector<at::Tensor> joint_linear(const at::Tensor& x, at::TensorList weights, at::TensorList biases) {
  return JointLinear::apply(x, weights, biases);
}

}  // namespace megashard
