#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// fp32 matrix products on CPUs where MKL, LibTorch's default, has slow kernels: on AVX-512 CPUs that are not Intel's,
/// MKL uses AVX2 (EPYC 9005, one core: 110 GFLOP/s with MKL, 240 with others). Products of 2^16 to 2^27 multiplications
/// have a kernel of their own (packed_product.h), larger ones oneDNN's. Tiny products, other dtypes and other CPUs use
/// LibTorch. The choice depends only on CPU, dtype, sizes and strides, so runs are reproducible. No autograd. Signal
/// handlers may run meanwhile on other threads (signals_held.h).

/// True if products with matrices like x do not use LibTorch.
bool has_own_products(const at::Tensor& x);

/// a b for matrices [n, k] and [k, m] with any strides (at::mm).
at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b);

/// beta c + alpha a b, where c is [n, m] (at::addmm).
at::Tensor matrix_product(const at::Tensor& c, double beta, const at::Tensor& a, const at::Tensor& b, double alpha);

/// result = a b, where result [n, m] is dense and on a CPU (at::mm_out).
void matrix_product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

/// c += a b, in place.
void add_matrix_product_(at::Tensor& c, const at::Tensor& a, const at::Tensor& b);

}  // namespace megashard
