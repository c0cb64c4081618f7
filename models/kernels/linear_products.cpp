#include "models/kernels/linear_products.h"

#include <ATen/ops/linear.h>

#include "framework/matrix_product.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"

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

}  // namespace megashard
