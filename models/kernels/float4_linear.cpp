#include "models/kernels/float4_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <bit>
#include <vector>

#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kBlock4 = 16;
constexpr double kLargest4 = 6, kLargestScale = 448, kLeastScale = 0x1p-6;  // of E2M1, E4M3; the least normal one
constexpr std::array<int, 16> kSigns = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};  // the recipe's

/// Numbers of at most 6 to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with their signs: to the nearest, of two the even one; or up as
/// often as they are near the upper one.
at::Tensor on_grid(const at::Tensor& x, bool at_random) {
  const at::Tensor size = x.abs();
  const at::Tensor step = at::where(size.lt(2), 0.5, at::where(size.lt(4), 1.0, 2.0)).to(x.scalar_type());
  const at::Tensor steps = size / step;
  const at::Tensor whole = at_random ? (steps + at::rand_like(steps)).floor() : steps.round();
  return whole * step * x.sign();
}

/// Rows [R, length] with each 16 numbers mixed by the Hadamard matrix; rows are filled up with zeros.
at::Tensor mixed(const at::Tensor& rows) {
  std::vector<float> values;
  for (uint32_t i = 0; i < kBlock4; ++i) {
    for (uint32_t j = 0; j < kBlock4; ++j)
      values.push_back(static_cast<float>(kSigns[i]) * (std::popcount(i & j) % 2 == 0 ? 0.25F : -0.25F));
  }
  const at::Tensor matrix = at::tensor(values, rows.options().dtype(at::kFloat)).view({kBlock4, kBlock4});
  const int64_t padding = (kBlock4 - rows.size(1) % kBlock4) % kBlock4;
  const at::Tensor blocks = at::constant_pad_nd(rows.to(at::kFloat), {0, padding}).reshape({-1, kBlock4});
  return at::mm(blocks, matrix).to(at::kBFloat16).view({rows.size(0), -1});
}

/// a [M, K], b [N, K] -> a b^T [M, N] of `dtype`
at::Tensor product_of_float4(const Float4Factor& a, const Float4Factor& b, at::ScalarType dtype) {
  const bool in_bf16 = a.numbers.is_cuda() && dtype == at::kBFloat16;
  const auto sums =
      in_bf16 ? at::mm(a.numbers.to(dtype), b.numbers.to(dtype).t(), at::kFloat) : at::mm(a.numbers, b.numbers.t());
  return (sums * (a.scale * b.scale)).to(dtype);
}

struct Float4Product : torch::autograd::Function<Float4Product> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    const auto rows = x.reshape({-1, weight.size(1)});
    return product_of_float4(rounded_to_float4(rows, 1, false), rounded_to_float4(weight, kBlock4, false),
                             x.scalar_type())
        .view(sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("float4_linear");
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto grad = grads[0].reshape({-1, weight.size(0)}), rows = x.reshape({-1, weight.size(1)});
    const at::ScalarType dtype = grad.scalar_type();
    Variable grad_x, grad_weight;
    if (context->needs_input_grad(0)) {
      const auto of_weight = rounded_to_float4(weight, kBlock4, false);
      grad_x = product_of_float4(rounded_to_float4(grad, 1, true), {of_weight.numbers.t(), of_weight.scale}, dtype)
                   .view(x.sizes());
    }
    if (context->needs_input_grad(1)) {
      const auto columns = [](const at::Tensor& each) { return mixed(each.to(at::kBFloat16).t()); };
      grad_weight = product_of_float4(rounded_to_float4(columns(grad), 1, true),
                                      rounded_to_float4(columns(rows), 1, false), dtype)
                        .to(weight.scalar_type());
    }
    return {grad_x, grad_weight};
  }
};

}  // namespace

Float4Factor rounded_to_float4(const at::Tensor& x, int64_t block_rows, bool at_random) {
  const std::vector<int64_t> sizes{x.size(0) / block_rows, block_rows, x.size(1) / kBlock4, kBlock4};
  const at::Tensor blocks = x.to(at::kBFloat16).to(at::kFloat).contiguous().view(sizes);
  const at::Tensor amax = blocks.abs().amax({1, 3}, /*keepdim=*/true), largest = amax.amax();
  const at::Tensor scale = largest / (kLargestScale * kLargest4);
  const at::Tensor divisor = at::where(scale.eq(0), at::ones_like(scale), scale);
  const at::Tensor of_blocks = (amax / kLargest4 / divisor).clamp(kLeastScale, kLargestScale);
  const at::Tensor scales = of_blocks.to(at::kFloat8_e4m3fn).to(at::kFloat);
  const at::Tensor fitted = (blocks * (divisor.reciprocal() / scales)).clamp(-kLargest4, kLargest4);
  return {(on_grid(fitted, at_random) * scales).view(x.sizes()), scale};
}

at::Tensor float4_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.numel() == 0) return linear(x, weight, bias);
  const auto y = Float4Product::apply(x, weight);
  return bias.defined() ? y + bias : y;
}

}  // namespace megashard
