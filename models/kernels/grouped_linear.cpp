#include "models/kernels/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "framework/matrix_product.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/gpu/gpu_kernels.h"
#include "models/kernels/linear_products.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"
#include "parallel/device/device_plan.h"

namespace megashard {

std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows) {
  const at::Tensor host = counts.cpu();
  const auto* first = host.const_data_ptr<int64_t>();
  std::vector<int64_t> values(first, first + host.numel());
  if (!device_is_planned()) return values;
  const auto groups = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < groups; ++i) values[static_cast<size_t>(i)] = rows * (i + 1) / groups - rows * i / groups;
  return values;
}

const at::Tensor& RowGroups::ends() {
  if (!ends_.defined()) ends_ = at::cumsum(counts_, 0, at::kInt);
  return ends_;
}

const std::vector<int64_t>& RowGroups::on_host() {
  if (!on_host_) on_host_ = counts_on_host(counts_, rows_);
  return *on_host_;
}

namespace {

/// Rows for product_into: as fp32 if 16-bit products are slow. Also for small 16-bit products, if fp32 has products of
/// our own: LibTorch's take longer to create a kernel for each number of rows than to multiply.
at::Tensor rows_for_products(const at::Tensor& x, const at::Tensor& weight) {
  constexpr int64_t kMostRows = 256, kLargestMatrix = 1 << 20;
  const int64_t groups = weight.size(0);
  const bool is_small = x.size(0) <= groups * kMostRows && weight.numel() <= groups * kLargestMatrix;
  if (!is_small || !x.is_cpu() || x.element_size() != 2) return widened_for_products(x);
  const bool widens = has_own_products(at::empty({0}, x.options().dtype(at::kFloat)));
  return widens ? x.to(at::kFloat) : widened_for_products(x);
}

/// result = a b, rounded to its dtype.
void product_into(at::Tensor result, const at::Tensor& a, const at::Tensor& b) {
  if (result.scalar_type() == a.scalar_type()) {
    matrix_product_into(result, a, b);
  } else {
    result.copy_(matrix_product(a, b.to(a.scalar_type())));
  }
}

/// Calls visit(group, first row, number of rows) for each group.
template <class Visit>
void over_groups(RowGroups& groups, const Visit& visit) {
  int64_t first = 0;
  for (int64_t group = 0; group < groups.size(); ++group) {
    const int64_t count = groups.on_host()[static_cast<size_t>(group)];
    visit(group, first, count);
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
  const auto matrices = weight.flatten(1, 2);
  at::Tensor y;
  if (by_one_kernel(x, matrices.sizes().slice(1), groups)) {
    y = at::_grouped_mm(x, matrices.transpose(1, 2), groups.ends());
  } else {
    y = at::empty({x.size(0), parts * out}, x.options());
    const auto rows = rows_for_products(x, weight);
    over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
      if (count > 0) product_into(y.narrow(0, first, count), rows.narrow(0, first, count), matrices[group].t());
    });
  }
  return parts_of(y, -1, std::vector<int64_t>(static_cast<size_t>(parts), out));
}

at::Tensor grouped_gradient_of_input(at::TensorList grads, const at::Tensor& weight, RowGroups& groups) {
  const auto matrices = weight.flatten(1, 2);
  const auto joined = joined_columns(grads);
  if (by_one_kernel(joined, matrices.sizes().slice(1), groups)) return at::_grouped_mm(joined, matrices, groups.ends());
  const auto result = at::empty({joined.size(0), weight.size(3)}, joined.options());
  const auto rows = rows_for_products(joined, weight);
  over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    if (count > 0) product_into(result.narrow(0, first, count), rows.narrow(0, first, count), matrices[group]);
  });
  return result;
}

at::Tensor grouped_gradient_of_weight(at::TensorList grads, const at::Tensor& x, RowGroups& groups) {
  const auto parts = static_cast<int64_t>(grads.size()), out = grads[0].size(1), in = x.size(1);
  const auto joined = joined_columns(grads);
  at::Tensor result;
  if (by_one_kernel(x, {parts * out, in}, groups)) {
    result = at::_grouped_mm(joined.t(), x, groups.ends());
  } else {
    result = at::empty({groups.size(), parts * out, in}, x.options());
    const auto columns = rows_for_products(joined, result).t(), rows = rows_for_products(x, result);
    over_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
      if (count == 0) result[group].zero_();
      if (count > 0) product_into(result[group], columns.narrow(1, first, count), rows.narrow(0, first, count));
    });
  }
  return result.view({groups.size(), parts, out, in});
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// [groups, out, in] as one part per group.
at::Tensor with_parts(const at::Tensor& weight) { return weight.dim() == 3 ? weight.unsqueeze(1) : weight; }

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                               const RowGroupsPtr& groups) {
    context->save_for_backward({x, weight});
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    return grouped_product(x, with_parts(weight), *groups);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    variable_list results(3);
    if (context->needs_input_grad(0)) results[0] = grouped_gradient_of_input(grads, with_parts(weight), groups);
    if (context->needs_input_grad(1)) results[1] = grouped_gradient_of_weight(grads, x, groups).view(weight.sizes());
    return results;
  }
};

struct GroupedSwigluLinear : torch::autograd::Function<GroupedSwigluLinear> {
  static Variable forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in,
                          const at::Tensor& weight, const RowGroupsPtr& groups) {
    const auto [gate, up] = in_one_layout(gate_in, up_in);
    context->save_for_backward({gate, up, weight});
    context->saved_data["groups"] = c10::IValue::make_capsule(groups);
    return grouped_product(fused_operators().swiglu(gate, up), with_parts(weight), *groups)[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("grouped_swiglu_linear");
    auto& groups = static_cast<RowGroups&>(*context->saved_data["groups"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& weight = saved[2];
    variable_list results(4);
    auto product = grouped_gradient_of_input(grads, with_parts(weight), groups).contiguous();
    std::tie(results[0], results[1]) = fused_operators().swiglu_backward_(product, saved[0], saved[1]);
    if (context->needs_input_grad(2)) results[2] = grouped_gradient_of_weight(grads, product, groups).squeeze(1);
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroupsPtr& groups) {
  return GroupedLinear::apply(x, weight, groups);
}

at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                                 const RowGroupsPtr& groups) {
  if (!has_kernel(fused_operators().swiglu, gate)) return grouped_linear(swiglu(gate, up), weight, groups)[0];
  return GroupedSwigluLinear::apply(gate, up, weight, groups);
}

}  // namespace megashard
