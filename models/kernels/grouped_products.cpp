#include "models/kernels/grouped_products.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "framework/matrix_product.h"
#include "models/kernels/column_parts.h"
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

std::vector<at::Tensor> grouped_product(const at::Tensor& x, const at::Tensor& weight, RowGroups& groups) {
  const int64_t parts = weight.size(1), out = weight.size(2);
  if (by_one_kernel(x, {parts * out, weight.size(3)}, groups)) {
    const auto y = at::_grouped_mm(x, weight.flatten(1, 2).transpose(1, 2), groups.ends());
    return parts_of(y, -1, std::vector<int64_t>(static_cast<size_t>(parts), out));
  }
  std::vector<at::Tensor> results;
  for (int64_t part = 0; part < parts; ++part) results.push_back(at::empty({x.size(0), out}, x.options()));
  const auto rows = widened_for_products(x);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    const auto some = rows.narrow(0, first, count);
    for (int64_t part = 0; part < parts; ++part)
      product_into(results[static_cast<size_t>(part)].narrow(0, first, count), some, weight[group][part].t());
  });
  return results;
}

at::Tensor grouped_gradient_of_input(at::TensorList grads, const at::Tensor& weight, RowGroups& groups) {
  const auto parts = static_cast<int64_t>(grads.size());
  if (by_one_kernel(grads[0], {parts * weight.size(2), weight.size(3)}, groups))
    return at::_grouped_mm(joined_columns(grads), weight.flatten(1, 2), groups.ends());
  const auto result = at::empty({grads[0].size(0), weight.size(3)}, grads[0].options());
  std::vector<at::Tensor> wide;
  for (const auto& grad : grads) wide.push_back(widened_for_products(grad));
  // 16-bit products would be rounded before they are added up.
  const bool joins = parts > 1 && wide[0].element_size() == 2;
  const auto rows = joins ? joined_columns(wide) : wide[0];
  const auto matrices = joins ? weight.flatten(1, 2) : weight.select(1, 0);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    if (joins || parts == 1) {
      product_into(result.narrow(0, first, count), rows.narrow(0, first, count), matrices[group]);
      return;
    }
    auto sum = matrix_product(rows.narrow(0, first, count), widened_for_products(matrices[group]));
    for (int64_t part = 1; part < parts; ++part)
      sum.add_(matrix_product(wide[static_cast<size_t>(part)].narrow(0, first, count),
                              widened_for_products(weight[group][part])));
    result.narrow(0, first, count).copy_(sum);
  });
  return result;
}

at::Tensor grouped_gradient_of_weight(at::TensorList grads, const at::Tensor& x, RowGroups& groups) {
  const auto parts = static_cast<int64_t>(grads.size()), out = grads[0].size(1);
  if (by_one_kernel(x, {parts * out, x.size(1)}, groups)) {
    const auto joined = joined_columns(grads);
    return at::_grouped_mm(joined.t(), x, groups.ends()).view({groups.size(), parts, out, x.size(1)});
  }
  const auto result = at::zeros({groups.size(), parts, out, x.size(1)}, x.options());
  std::vector<at::Tensor> wide;
  for (const auto& grad : grads) wide.push_back(widened_for_products(grad));
  const auto rows = widened_for_products(x);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    const auto some = rows.narrow(0, first, count);
    for (int64_t part = 0; part < parts; ++part)
      product_into(result[group][part], wide[static_cast<size_t>(part)].narrow(0, first, count).t(), some);
  });
  return result;
}

}  // namespace megashard
