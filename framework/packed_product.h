#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// fp32 products on CPUs whose kernel is the same for all sizes. Libraries create a kernel for each size or look it up,
/// which takes longer than a small product, and keep it: a mixture of experts has new sizes in each step. Sums do not
/// depend on the other rows nor on the number of threads.

/// True for products of 2^16 to 2^27 multiplications with at least three rows and 32 columns, where b or its transpose
/// has dense rows.
bool takes_packed_product(const at::Tensor& a, const at::Tensor& b);

/// result = a b for matrices that it takes, on a CPU. The rows of result [n, m] are dense.
void packed_product_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

}  // namespace megashard
