#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

// Rows of x [N * K, C], of which each token has chosen K: place [N, K] int64 has each row once. weights [N, K]. In fp32
// a CPU reads and writes each row once; elsewhere LibTorch's operators write the chosen rows and their products in
// between.

/// sum_k weights[n, k] x[place[n, k]], and its gradients -> [N, C], of the dtype to which x and weights promote.
at::Tensor weighted_sum_of_rows(const at::Tensor& x, const at::Tensor& place, const at::Tensor& weights);

/// sum_k x[place[n, k]], without autograd -> [N, C].
at::Tensor sum_of_rows(const at::Tensor& x, const at::Tensor& place);

}  // namespace megashard
