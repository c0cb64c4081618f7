#include "models/kernels/fused_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/fused_operators.h"
#include "models/kernels/head_kernels.h"
#include "models/kernels/linear_products.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

struct LinearByFp32 : Function<LinearByFp32> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return fused_operators().linear_by_fp32(x, weight);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto grad = widened_for_products(grads[0].reshape({-1, weight.size(0)}));
    Variable grad_x, grad_weight;
    if (context->needs_input_grad(0)) grad_x = gradient_of_linear_input(grad, weight).view(x.sizes());
    if (context->needs_input_grad(1)) grad_weight = gradient_of_linear_weight(grad, x);
    return {grad_x, grad_weight};
  }
};

struct OwnGradient : Function<OwnGradient> {
  static Variable forward(AutogradContext* /*context*/, const at::Tensor& weight) { return weight; }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& grads) {
    return {at::GradMode::is_enabled() ? grads[0] : grads[0].detach()};
  }
};

struct RmsNormFunction : Function<RmsNormFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight, double eps) {
    const auto x = input.contiguous();
    const auto [y, inverse_rms] = fused_operators().rms_norm(x, weight, eps);
    context->save_for_backward({x, weight, inverse_rms});
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("rms_norm");
    const auto saved = context->get_saved_variables();
    auto [grad_x, grad_weight] = fused_operators().rms_norm_backward(grads[0].contiguous(), saved[0], saved[1],
                                                                     saved[2], context->needs_input_grad(1), {});
    if (grad_weight.defined()) grad_weight = grad_weight.to(saved[1].scalar_type());
    return {grad_x, grad_weight, Variable()};
  }
};

struct AddRmsNormFunction : Function<AddRmsNormFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& residual, const at::Tensor& branch,
                               const at::Tensor& weight, double eps) {
    const auto [sum, y, inverse_rms] =
        fused_operators().add_rms_norm(residual.contiguous(), branch.contiguous(), weight, eps);
    context->save_for_backward({sum, weight, inverse_rms});
    return {sum, y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("add_rms_norm");
    const auto saved = context->get_saved_variables();
    auto [gradient, grad_weight] = fused_operators().rms_norm_backward(
        grads[1].contiguous(), saved[0], saved[1], saved[2], context->needs_input_grad(2), grads[0].contiguous());
    if (grad_weight.defined()) grad_weight = grad_weight.to(saved[1].scalar_type());
    return {gradient, gradient, grad_weight, Variable()};
  }
};

at::Tensor run_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  const auto dense = x.stride(-1) == 1 ? x : x.contiguous();
  return fused_operators().rotate(dense, cos, sin, back);
}

struct RotateFunction : Function<RotateFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return run_rotate(x, cos, sin, /*back=*/false);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("rotate");
    const auto saved = context->get_saved_variables();
    return {run_rotate(grads[0], saved[0], saved[1], /*back=*/true), Variable(), Variable()};
  }
};

struct NormAndRotateFunction : Function<NormAndRotateFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                          const at::Tensor& cos, const at::Tensor& sin, double eps, bool zero_centered) {
    const auto x = input.stride(-1) == 1 ? input : input.contiguous();
    const auto [y, inverse_rms] = fused_operators().norm_and_rotate(x, weight, cos, sin, eps, zero_centered);
    context->save_for_backward({x, weight, cos, sin, inverse_rms});
    context->saved_data["zero_centered"] = zero_centered;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("norm_and_rotate");
    const auto saved = context->get_saved_variables();
    auto [grad_x, grad_weight] = fused_operators().norm_and_rotate_backward(
        grads[0].contiguous(), saved[0], saved[1], saved[2], saved[3], saved[4],
        context->saved_data["zero_centered"].toBool(), context->needs_input_grad(1));
    if (grad_weight.defined()) grad_weight = grad_weight.to(saved[1].scalar_type());
    return {grad_x, grad_weight, Variable(), Variable(), Variable(), Variable()};
  }
};

struct SwigluFunction : Function<SwigluFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in) {
    const auto [gate, up] = in_one_layout(gate_in, up_in);
    context->save_for_backward({gate, up});
    return fused_operators().swiglu(gate, up);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("swiglu");
    const auto saved = context->get_saved_variables();
    const auto [grad_gate, grad_up] = fused_operators().swiglu_backward(grads[0].contiguous(), saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

}  // namespace

bool by_way_of_fp32(const at::Tensor& x) {
#if defined(__x86_64__)
  static const bool slow_bf16 = __builtin_cpu_supports("avx512bw") == 0;
  const bool slow = x.scalar_type() == at::kHalf || (slow_bf16 && x.scalar_type() == at::kBFloat16);
  return slow && fused_operators().linear_by_fp32.runs_on(x);
#else
  return false;
#endif
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (has_own_linear_products(x, weight)) {
    const auto product = LinearByFp32::apply(x, weight);
    return bias.defined() ? product + bias : product;
  }
  return at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
}

at::Tensor with_own_gradient(const at::Tensor& weight) { return OwnGradient::apply(weight); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), "rms_norm: the last dimension of x ",
              x.sizes(), " must be that of the weight ", weight.sizes());
  if (has_kernel(fused_operators().rms_norm, x) && alike(x, weight)) return RmsNormFunction::apply(x, weight, eps);
  return at::rms_norm(x, {x.size(-1)}, weight, eps);
}

NormedSum add_rms_norm(const at::Tensor& residual, const at::Tensor& branch, const at::Tensor& weight, double eps) {
  const bool fits = alike(residual, branch) && alike(residual, weight) && residual.sizes() == branch.sizes() &&
                    weight.dim() == 1 && residual.dim() >= 1 && residual.size(-1) == weight.size(0);
  if (!fits || !has_kernel(fused_operators().add_rms_norm, residual)) {
    const auto sum = residual + branch;
    return {sum, rms_norm(sum, weight, eps)};
  }
  const auto both = AddRmsNormFunction::apply(residual, branch, weight, eps);
  return {both[0], both[1]};
}

at::Tensor norm_and_rotate(const at::Tensor& x, const HeadNorm& norm, const at::Tensor& cos, const at::Tensor& sin) {
  const bool fits = x.dim() == 4 && x.size(3) <= kernels::kWidestHead && norm.weight.dim() == 1 &&
                    norm.weight.size(0) == x.size(3) && alike(x, norm.weight) && alike(x, cos);
  if (fits && has_kernel(fused_operators().norm_and_rotate, x)) {
    check_rotary(x, cos, sin);
    return NormAndRotateFunction::apply(x, norm.weight, cos.contiguous(), sin.contiguous(), norm.eps,
                                        norm.zero_centered);
  }
  if (!norm.zero_centered) return rotate(rms_norm(x, norm.weight, norm.eps), cos, sin);
  return rotate(rms_norm(x.to(at::kFloat), norm.weight.to(at::kFloat) + 1, norm.eps).to(x.scalar_type()), cos, sin);
}

void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool fits = x.dim() == 4 && cos.sizes() == sin.sizes() && cos.size(-2) == x.size(1) &&
                    2 * cos.size(-1) <= x.size(3) && (cos.dim() == 2 || cos.size(0) == 1 || cos.size(0) == x.size(0));
  TORCH_CHECK(fits, "rotate: x ", x.sizes(), " must be [B, T, H, D], and cos ", cos.sizes(), " and sin ", sin.sizes(),
              " [T, R/2] or [B, T, R/2] with R <= D: do the position ids have the sizes of the tokens?");
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  check_rotary(x, cos, sin);
  if (has_kernel(fused_operators().rotate, x) && alike(x, cos))
    return RotateFunction::apply(x, cos.contiguous(), sin.contiguous());
  const int64_t half = cos.size(-1);
  const auto c = cos.unsqueeze(-2);
  const auto s = sin.unsqueeze(-2);
  const auto first = x.narrow(3, 0, half);
  const auto second = x.narrow(3, half, half);
  const auto rest = x.narrow(3, 2 * half, x.size(3) - 2 * half);
  return at::cat({first * c - second * s, second * c + first * s, rest}, 3);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "swiglu: gate ", gate.sizes(), " and up ", up.sizes(), " must be alike");
  if (has_kernel(fused_operators().swiglu, gate) && alike(gate, up)) return SwigluFunction::apply(gate, up);
  return at::silu(gate) * up;
}

}  // namespace megashard
