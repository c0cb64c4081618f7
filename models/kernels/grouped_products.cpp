#include "models/kernels/grouped_products.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "framework/matrix_product.h"
#include "models/kernels/gpu/gpu_kernels.h"
#include "models/kernels/linear_products.h"

namespace megashard {
namespace {

/// result = a b, rounded to its dtype.
void product_into(at::Tensor result, const at::Tensor& a, const at::Tensor& b) {
  if (result.scalar_type() == a.scalar_type()) {
    matrix_product_into(result, a, b);
  } else {
    result.copy_(matrix_product(a, widened_for_products(b)));
  }
}

/// Calls visit(group, first row, number of rows) for each non-empty group.
template <class Visit>
void over_groups(RowGroups& groups, const Visit& visit) {
  int64_t first = 0;
  for (int64_t group = 0; group < groups.size(); ++group) {
    const int64_t count = groups.on_host()[static_cast<size_t>(group)];
    if (count > 0) visit(group, first, count);
    first += count;
  }
}

bool by_one_kernel(const at::Tensor& x, at::IntArrayRef matrix, const RowGroups& groups) {
  return x.size(0) > 0 && has_grouped_kernel(x, matrix, groups.size());
}

}  // namespace

bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups) {
  constexpr int64_t kInVector = 8, kMostGroups = 1023;
  const bool fits = x.is_cuda() && x.scalar_type() == at::kBFloat16 && groups <= kMostGroups &&
                    matrix[0] % kInVector == 0 && matrix[1] % kInVector == 0;
  return fits && gpu::gpu_kernels().has_grouped_products();
}

at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& matrices, RowGroups& groups) {
  if (by_one_kernel(x, matrices.sizes().slice(1), groups))
    return at::_grouped_mm(x, matrices.transpose(1, 2), groups.ends());
  auto y = at::empty({x.size(0), matrices.size(1)}, x.options());
  const auto rows = widened_for_products(x);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    product_into(y.narrow(0, first, count), rows.narrow(0, first, count), matrices[group].t());
  });
  return y;
}

at::Tensor grouped_gradient_of_input(const at::Tensor& grad, const at::Tensor& matrices, RowGroups& groups) {
  if (by_one_kernel(grad, matrices.sizes().slice(1), groups)) return at::_grouped_mm(grad, matrices, groups.ends());
  auto result = at::empty({grad.size(0), matrices.size(2)}, grad.options());
  const auto rows = widened_for_products(grad);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    product_into(result.narrow(0, first, count), rows.narrow(0, first, count), matrices[group]);
  });
  return result;
}

at::Tensor grouped_gradient_of_weight(const at::Tensor& grad, const at::Tensor& x, RowGroups& groups) {
  if (by_one_kernel(x, {grad.size(1), x.size(1)}, groups)) return at::_grouped_mm(grad.t(), x, groups.ends());
  const auto result = at::zeros({groups.size(), grad.size(1), x.size(1)}, x.options());
  const auto wide_grad = widened_for_products(grad), rows = widened_for_products(x);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    product_into(result[group], wide_grad.narrow(0, first, count).t(), rows.narrow(0, first, count));
  });
  return result;
}

}  // namespace megashard
