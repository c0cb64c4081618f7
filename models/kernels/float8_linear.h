#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

enum class Float8Recipe {
  kTensorwise,  ///< one fp32 scale a tensor, under which its largest magnitude is the format's (torchao's Float8Linear)
  kMxfp8,       ///< a power of two for each 32 numbers along the sum of the product (OCP's MX, exponents rounded up)
};

struct Float8Options {
  Float8Recipe recipe = Float8Recipe::kTensorwise;
  at::ScalarType gradient_format = at::kFloat8_e4m3fn;  ///< or e5m2; inputs and weights are e4m3
};

/// y = x W^T + b with the factors of all three products (y, and in backward the gradients of x and W) rounded to fp8
/// at each call, sums in fp32. x [..., in], W [out, in], b [out] or undefined; y has the dtype of x. An infinity among
/// the numbers of a scale makes them NaN. What is saved for backward is x and W themselves. Tensor by tensor GPUs
/// compute at::_scaled_mm where sizes are multiples of 16; elsewhere the rounded numbers are multiplied in the dtype
/// of x, which has them exactly.
at::Tensor float8_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const Float8Options& options);

}  // namespace megashard
