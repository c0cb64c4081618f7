#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// y = x W^T + b with the factors of all three products (y, and in backward the gradients of x and W) rounded to NVFP4
/// in each call, with sums in fp32: torchao's and Transformer Engine's recipe for training. Numbers are E2M1 with an
/// E4M3 scale per 16 numbers along the reduction dimension, of weights per 16 x 16, and one fp32 scale per tensor. The
/// factors of W's gradient are mixed by a Hadamard matrix with fixed signs before, and gradients are rounded up or down
/// at random, without bias. Factors of other dtypes are taken as bf16. x [..., in], W [out, in], in and out multiples
/// of 16, b [out] or undefined; y has the dtype of x. Saves x and W for backward. The rounded numbers are multiplied in
/// bf16 (on GPUs, for bf16) or fp32, which represent them exactly.
at::Tensor float4_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// A factor as numbers * scale.
struct Float4Factor {
  at::Tensor numbers;  ///< fp32: E2M1 numbers times the scales of their blocks
  at::Tensor scale;    ///< one fp32 number
};
/// Rounds x [rows, length], length a multiple of 16, to the nearest, or at random. `block_rows`: of a block with one
/// scale; it divides the rows.
Float4Factor rounded_to_float4(const at::Tensor& x, int64_t block_rows, bool at_random);

}  // namespace megashard
