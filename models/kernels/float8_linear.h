#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

enum class Float8Recipe {
  kTensorwise,  ///< one fp32 scale per tensor, which maps its amax to the format's maximum (torchao's Float8Linear)
  kMxfp8,       ///< a power of two per 32 numbers along the reduction dimension (OCP's MX, exponents rounded up)
};

struct Float8Options {
  Float8Recipe recipe = Float8Recipe::kTensorwise;
  at::ScalarType gradient_format = at::kFloat8_e4m3fn;  ///< or e5m2; inputs and weights are e4m3
};

/// y = x W^T + b with the factors of all three products (y, and in backward the gradients of x and W) rounded to fp8 in
/// each call, with sums in fp32. x [..., in], W [out, in], b [out] or undefined; y has the dtype of x. An infinity
/// makes all numbers with its scale NaN. Saves x and W for backward. With kTensorwise GPUs use at::_scaled_mm if sizes
/// are multiples of 16; otherwise the rounded numbers are multiplied in bf16 (on GPUs, for bf16) or fp32, which
/// represent them exactly.
at::Tensor float8_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const Float8Options& options);

}  // namespace megashard
