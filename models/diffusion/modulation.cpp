#include "models/diffusion/modulation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <tuple>

#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// The values of each patch, which broadcast to [B, T, C].
at::Tensor of_patches(const at::Tensor& values, const at::Tensor& second) {
  if (!second.defined() || values.dim() == 1) return values;
  return at::where(second.unsqueeze(-1), values.narrow(1, 1, 1), values.narrow(1, 0, 1));
}

/// The gradient of `values` from that of of_patches(values), [B, T, C].
at::Tensor sum_of_patches(const at::Tensor& grad, const at::Tensor& values, const at::Tensor& second) {
  if (values.dim() == 1) return grad.sum(at::IntArrayRef{0, 1});
  if (!second.defined()) return grad.sum(1, /*keepdim=*/true);
  return at::bmm(at::stack({second.logical_not(), second}, 1).to(grad.scalar_type()), grad);
}

std::optional<at::Tensor> given(const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; }

/// What a norm of x [B, T, C] in fp32 subtracts and multiplies by, [B, T, 1]. mean: undefined for RMSNorm.
struct NormParts {
  at::Tensor normed, mean, inverse;
};

NormParts norm_parts(const at::Tensor& x, double eps, NormKind kind) {
  if (kind == NormKind::kLayerNorm) {
    auto [normed, mean, inverse] = at::native_layer_norm(x, {x.size(-1)}, std::nullopt, std::nullopt, eps);
    return {normed, mean, inverse};
  }
  const auto inverse = x.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
  return {x * inverse, {}, inverse};
}

/// The gradient of x from that of the normed values.
at::Tensor norm_backward(const at::Tensor& grad, const at::Tensor& x, const NormParts& parts) {
  if (parts.mean.defined())
    return std::get<0>(at::native_layer_norm_backward(grad, x, {x.size(-1)}, parts.mean, parts.inverse, std::nullopt,
                                                      std::nullopt, {true, false, false}));
  const auto along = (grad * parts.normed).mean(-1, /*keepdim=*/true);
  return (grad - parts.normed * along).mul_(parts.inverse);
}

struct ModulatedNorm : torch::autograd::Function<ModulatedNorm> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& factor,
                          const at::Tensor& shift, const std::optional<at::Tensor>& second, double eps, bool is_rms) {
    const auto chosen = second.value_or(at::Tensor());
    const auto parts = norm_parts(x.to(at::kFloat), eps, is_rms ? NormKind::kRmsNorm : NormKind::kLayerNorm);
    context->save_for_backward({x, factor, parts.mean, parts.inverse, chosen});
    return at::addcmul(of_patches(shift, chosen), parts.normed, of_patches(factor, chosen)).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("modulated_norm");
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &factor = saved[1], &mean = saved[2], &inverse = saved[3], &second = saved[4];
    const auto grad = grads[0].to(at::kFloat), wide = x.to(at::kFloat);
    const NormParts parts{(mean.defined() ? wide - mean : wide) * inverse, mean, inverse};
    variable_list results(6);
    if (context->needs_input_grad(1)) results[1] = sum_of_patches(parts.normed * grad, factor, second);
    if (context->needs_input_grad(2)) results[2] = sum_of_patches(grad, factor, second);
    if (context->needs_input_grad(0))
      results[0] = norm_backward(grad * of_patches(factor, second), wide, parts).to(x.scalar_type());
    return results;
  }
};

struct GatedSum : torch::autograd::Function<GatedSum> {
  static Variable forward(AutogradContext* context, const at::Tensor& residual, const at::Tensor& branch,
                          const at::Tensor& gate, const std::optional<at::Tensor>& second) {
    const auto chosen = second.value_or(at::Tensor());
    context->save_for_backward({branch, gate, chosen});
    return (branch * of_patches(gate, chosen)).add_(residual).to(residual.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("gated_sum");
    const auto saved = context->get_saved_variables();
    const auto &branch = saved[0], &gate = saved[1], &second = saved[2];
    variable_list results(4);
    results[0] = grads[0];
    if (context->needs_input_grad(1)) results[1] = (grads[0] * of_patches(gate, second)).to(branch.scalar_type());
    if (context->needs_input_grad(2)) results[2] = sum_of_patches(grads[0].to(at::kFloat) * branch, gate, second);
    return results;
  }
};

}  // namespace

at::Tensor modulated_norm(const at::Tensor& x, const Modulation& modulation, const at::Tensor& second, double eps,
                          NormKind kind) {
  return ModulatedNorm::apply(x, modulation.factor, modulation.shift, given(second), eps, kind == NormKind::kRmsNorm);
}

at::Tensor gated_sum(const at::Tensor& residual, const at::Tensor& branch, const at::Tensor& gate,
                     const at::Tensor& second) {
  return GatedSum::apply(residual, branch, gate, given(second));
}

}  // namespace megashard
