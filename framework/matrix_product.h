#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Matrix products in fp32 by oneDNN, where MKL, which LibTorch takes for them, has slow kernels: on CPUs with AVX-512
/// that are not Intel's, MKL runs those of AVX2 (EPYC 9005, one core: 110 GFLOP/s by MKL, 240 by oneDNN). Small
/// matrices, other dtypes and other CPUs are LibTorch's. The choice depends on the CPU, dtype and sizes alone, so a run
/// repeats itself. Without autograd. Signal handlers may run meanwhile, on other threads (signals_held.h).

/// Whether products of matrices like x are not LibTorch's own.
bool has_own_products(const at::Tensor& x);

/// a b of matrices [n, k] and [k, m] of any strides: at::mm.
at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b);

/// beta c + alpha a b, c of sizes [n, m]: at::addmm.
at::Tensor matrix_product(const at::Tensor& c, double beta, const at::Tensor& a, const at::Tensor& b, double alpha);

/// result = a b, result [n, m] dense and on a CPU: at::mm_out.
void matrix_product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

/// c += a b, in place.
void add_matrix_product_(at::Tensor& c, const at::Tensor& a, const at::Tensor& b);

}  // namespace megashard
