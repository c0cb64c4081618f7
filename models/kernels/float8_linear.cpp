#include "models/kernels/float8_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>

#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr at::ScalarType kFormat = at::kFloat8_e4m3fn;  // of inputs and weights
constexpr int64_t kBlock = 32;                          // numbers per MX scale
constexpr int64_t kTile = 16;                           // cuBLAS requires multiples of this
constexpr double kLeastAmax = 1e-12;                    // torchao's; gives a tensor of zeros a scale

double largest_of(at::ScalarType format) { return format == at::kFloat8_e5m2 ? 57344 : 448; }

/// value = number * scale
struct Scaled {
  at::Tensor numbers;  // fp8, contiguous
  at::Tensor scale;    // one fp32 number
};

Scaled rounded(const at::Tensor& x, at::ScalarType format) {
  const double largest = largest_of(format);
  const at::Tensor factor = (largest / x.abs().amax().to(at::kDouble).clamp_min(kLeastAmax)).to(at::kFloat);
  const at::Tensor numbers = (x.to(at::kFloat) * factor).clamp(-largest, largest).to(format);
  return {numbers.contiguous(), factor.reciprocal()};
}

/// Rounds blocks of 32 numbers of a row to values in fp32; the scale is the least 2^e that fits the largest one.
at::Tensor rounded_in_blocks(const at::Tensor& x, at::ScalarType format) {
  const double largest = largest_of(format);
  const int64_t length = x.size(1), padding = (kBlock - length % kBlock) % kBlock;
  const at::Tensor blocks =
      at::constant_pad_nd(x.to(at::kFloat), {0, padding}).view({x.size(0), (length + padding) / kBlock, kBlock});
  const at::Tensor amax = blocks.abs().amax(-1, /*keepdim=*/true);
  const auto [digits, exponent] = at::frexp(amax / largest);  // in [1/2, 1)
  const at::Tensor least = (exponent - digits.eq(0.5).to(exponent.scalar_type())).clamp(-127, 127);
  const at::Tensor scale = at::exp2(least.to(at::kFloat)) + (amax - amax);  // NaN for an infinity
  const at::Tensor values = (blocks / scale).clamp(-largest, largest).to(format).to(at::kFloat) * scale;
  return values.flatten(1).narrow(1, 0, length);
}

Scaled transposed(const Scaled& x) { return {x.numbers.t().contiguous(), x.scale}; }

/// bf16 represents all numbers of fp8 and MX. CPUs are faster in fp32, and fp16 lacks the range of scales.
at::ScalarType work_dtype(const at::Tensor& x, at::ScalarType dtype) {
  return !x.is_cpu() && dtype == at::kBFloat16 ? dtype : at::kFloat;
}

// a [M, K], b [N, K] -> a b^T [M, N] of `dtype`

at::Tensor product(const Scaled& a, const Scaled& b, at::ScalarType dtype) {
  if (!a.numbers.is_cpu() && a.numbers.size(1) % kTile == 0 && b.numbers.size(0) % kTile == 0) {
    return at::_scaled_mm(a.numbers, b.numbers.t(), a.scale, b.scale, /*bias=*/std::nullopt,
                          /*scale_result=*/std::nullopt, dtype);
  }
  const at::ScalarType work = work_dtype(a.numbers, dtype);
  const auto sums = at::mm(a.numbers.to(work), b.numbers.to(work).t());
  return (sums.to(at::kFloat) * (a.scale * b.scale)).to(dtype);
}

at::Tensor product_in_blocks(const at::Tensor& a, at::ScalarType a_format, const at::Tensor& b, at::ScalarType dtype) {
  const at::ScalarType work = work_dtype(a, dtype);
  return at::mm(rounded_in_blocks(a, a_format).to(work), rounded_in_blocks(b, kFormat).to(work).t()).to(dtype);
}

struct Float8Product : torch::autograd::Function<Float8Product> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, int64_t recipe,
                          int64_t gradient_format) {
    context->save_for_backward({x, weight});
    context->saved_data["recipe"] = recipe;
    context->saved_data["gradient_format"] = gradient_format;
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    const auto rows = x.reshape({-1, weight.size(1)});
    const auto y = static_cast<Float8Recipe>(recipe) == Float8Recipe::kMxfp8
                       ? product_in_blocks(rows, kFormat, weight, x.scalar_type())
                       : product(rounded(rows, kFormat), rounded(weight, kFormat), x.scalar_type());
    return y.view(sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("float8_linear");
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto recipe = static_cast<Float8Recipe>(context->saved_data["recipe"].toInt());
    const auto format = static_cast<at::ScalarType>(context->saved_data["gradient_format"].toInt());
    const auto grad = grads[0].reshape({-1, weight.size(0)}), rows = x.reshape({-1, weight.size(1)});
    const at::ScalarType dtype = grad.scalar_type();
    const bool of_x = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    Variable grad_x, grad_weight;
    if (recipe == Float8Recipe::kMxfp8) {  // other blocks along another reduction dimension
      if (of_x) grad_x = product_in_blocks(grad, format, weight.t(), dtype);
      if (of_weight) grad_weight = product_in_blocks(grad.t(), format, rows.t(), dtype);
    } else {
      const Scaled scaled = rounded(grad, format);
      if (of_x) grad_x = product(scaled, transposed(rounded(weight, kFormat)), dtype);
      if (of_weight) grad_weight = product(transposed(scaled), transposed(rounded(rows, kFormat)), dtype);
    }
    if (of_x) grad_x = grad_x.view(x.sizes());
    if (of_weight) grad_weight = grad_weight.to(weight.scalar_type());
    return {grad_x, grad_weight, Variable(), Variable()};
  }
};

}  // namespace

at::Tensor float8_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const Float8Options& options) {
  if (x.numel() == 0) return linear(x, weight, bias);
  const auto y = Float8Product::apply(x, weight, static_cast<int64_t>(options.recipe),
                                      static_cast<int64_t>(options.gradient_format));
  return bias.defined() ? y + bias : y;
}

}  // namespace megashard
