#include "models/kernels/linear_products.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include "framework/matrix_product.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"

namespace megashard {

bool has_own_linear_products(const at::Tensor& x, const at::Tensor& weight) {
  return (by_way_of_fp32(x) || has_own_products(x)) && x.scalar_type() == weight.scalar_type() &&
         x.device() == weight.device();
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!has_own_linear_products(x, weight))
    return at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  const auto product = fused_operators().linear_by_fp32(x, weight);
  return bias.defined() ? product + bias : product;
}

at::Tensor widened_for_products(const at::Tensor& x) { return by_way_of_fp32(x) ? x.to(at::kFloat) : x; }

at::Tensor gradient_of_linear_input(const at::Tensor& grad, const at::Tensor& weight) {
  return matrix_product(grad, widened_for_products(weight)).to(weight.scalar_type());
}

at::Tensor gradient_of_linear_weight(const at::Tensor& grad, const at::Tensor& x) {
  const auto rows = x.reshape({-1, x.size(-1)});
  return matrix_product(grad.t(), widened_for_products(rows)).to(x.scalar_type());
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct SwigluLinear : torch::autograd::Function<SwigluLinear> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in,
                          const at::Tensor& weight, at::TensorList bias) {
    const auto [gate, up] = in_one_layout(gate_in, up_in);
    context->save_for_backward({gate, up, weight});
    context->saved_data["has_bias"] = !bias.empty();
    return linear_product(fused_operators().swiglu(gate, up), weight, bias.empty() ? at::Tensor() : bias[0]);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("swiglu_linear");
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1], &weight = saved[2];
    const bool of_weight = context->needs_input_grad(2);
    const auto rows = grads[0].reshape({-1, weight.size(0)});
    const auto grad = widened_for_products(rows);
    auto product = gradient_of_linear_input(grad, weight);  // then overwritten by swiglu(gate, up)
    const auto [grad_gate, grad_up] = of_weight ? fused_operators().swiglu_backward_(product, gate, up)
                                                : fused_operators().swiglu_backward(product, gate, up);
    variable_list results{grad_gate, grad_up, of_weight ? gradient_of_linear_weight(grad, product) : Variable()};
    if (context->saved_data["has_bias"].toBool())
      results.push_back(context->needs_input_grad(3) ? rows.sum(0) : Variable());
    return results;
  }
};

}  // namespace

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const at::Tensor& bias) {
  const auto like_gate = [&](const at::Tensor& other) {
    return other.scalar_type() == gate.scalar_type() && other.device() == gate.device();
  };
  const bool fused = has_kernel(fused_operators().swiglu, gate) && like_gate(up) && like_gate(weight);
  if (!fused || gate.sizes() != up.sizes()) return linear(swiglu(gate, up), weight, bias);
  return SwigluLinear::apply(gate, up, weight, bias.defined() ? at::TensorList(bias) : at::TensorList());
}

}  // namespace megashard
