#pragma once

#include <ATen/core/Tensor.h>

/// Differentiable functions whose eager form wastes memory or memory bandwidth. For fp32, bf16 and fp16 they use
/// cpu_kernels.h on CPUs and gpu_operators.h on GPUs, otherwise LibTorch's operators. First derivatives only: a second
/// backward is an error.
namespace megashard {

/// True if LibTorch is so slow in x's dtype (bf16 on CPUs without AVX-512, fp16 on x86) that fp32 with conversions,
/// which rounds equally often, is many times faster.
bool by_way_of_fp32(const at::Tensor& x);

/// x W^T + bias; bias may be undefined. fp32 products use framework/matrix_product.h. If by_way_of_fp32(x), inputs are
/// converted; the copies are not kept, so backward converts again.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// For a weight that is also used elsewhere (tied embeddings): its gradient gets its own memory instead of a view, so
/// that autograd accumulates the other gradient in place. Needs two buffers of the weight's size instead of three.
at::Tensor with_own_gradient(const at::Tensor& weight);

/// weight * x / sqrt(mean(x^2) + eps) over the last dimension; weight [width]. Statistics in fp32.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// residual + branch, rounded to their dtype, and rms_norm() of it: bit-identical to the separate functions, but in one
/// pass over memory, also in backward. All have the same dtype; residual and branch have the same sizes.
struct NormedSum {
  at::Tensor sum, normed;
};
NormedSum add_rms_norm(const at::Tensor& residual, const at::Tensor& branch, const at::Tensor& weight, double eps);

/// Rotary embedding as transformers' rotate_half: rotates pairs (i, i + R/2) of the first R channels. x [B, T, H, D];
/// cos, sin [T, R/2] or [B, T, R/2], in x's dtype. Returns [B, T, H, D], contiguous.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Throws unless rotate() supports these tensors.
void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// rotate() of each head's norm: rms_norm() with `weight`, or zero-centred with 1 + weight, in fp32 until its result.
/// Rounds as the separate functions, in one pass over memory. Only x's last dimension must be contiguous.
struct HeadNorm {
  at::Tensor weight;  // [D]
  double eps = 0;
  bool zero_centered = false;
};
at::Tensor norm_and_rotate(const at::Tensor& x, const HeadNorm& norm, const at::Tensor& cos, const at::Tensor& sin);

/// silu(gate) * up; saves only gate and up.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace megashard
