#pragma once

#include <ATen/core/Tensor.h>

/// Differentiable functions whose eager form wastes memory or passes over it. For fp32, bf16 and fp16 they
/// run cpu_kernels.h on CPUs and gpu_operators.h on GPUs; elsewhere LibTorch's operators. First derivatives
/// only: a second backward is an error.
namespace megashard {

/// Whether LibTorch computes in x's dtype so slowly (bf16 on CPUs without AVX-512, fp16 on x86) that
/// fp32 with conversions, which rounds as often, is many times as fast.
bool by_way_of_fp32(const at::Tensor& x);

/// x W^T + bias, bias may be undefined. fp32 products are those of framework/matrix_product.h; where
/// by_way_of_fp32(x), they are of converted copies, which are not kept: backward converts again.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// A weight that is used once more elsewhere (tied embeddings). What comes back for it has memory of
/// its own and not that of a view, so that autograd adds the other use's gradient in place: two
/// buffers of the weight's size instead of three.
at::Tensor with_own_gradient(const at::Tensor& weight);

/// weight * x / sqrt(mean(x^2) + eps) over the last dimension; weight [width]. Statistics in fp32.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// residual + branch, rounded to their dtype, and rms_norm() of it: what the two functions give, bit for bit, in one
/// pass over memory, and so backward. All have the same dtype; residual and branch the same sizes.
struct NormedSum {
  at::Tensor sum, normed;
};
NormedSum add_rms_norm(const at::Tensor& residual, const at::Tensor& branch, const at::Tensor& weight, double eps);

/// Rotary embedding, as transformers' rotate_half does it: pairs (i, i + R/2) of the first R
/// channels are turned. x [B, T, H, D]; cos, sin [T, R/2] or [B, T, R/2], of x's dtype. Returns [B,
/// T, H, D], dense.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Throws unless rotate() takes them.
void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// rotate() of each head's norm: rms_norm() by `weight`, or zero-centred, by 1 + weight and in fp32 up to its result.
/// The roundings of one after the other, in one pass over memory; x need be dense in its last dimension only.
struct HeadNorm {
  at::Tensor weight;  // [D]
  double eps = 0;
  bool zero_centered = false;
};
at::Tensor norm_and_rotate(const at::Tensor& x, const HeadNorm& norm, const at::Tensor& cos, const at::Tensor& sin);

/// silu(gate) * up; keeps gate and up only.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace megashard
