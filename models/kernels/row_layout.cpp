#include "models/kernels/row_layout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {

std::optional<RowLayout> row_layout(const at::Tensor& x) {
  const int64_t dims = x.dim();
  if (dims == 0) return std::nullopt;
  const int64_t width = x.size(-1);
  if (x.is_contiguous()) return RowLayout{width == 0 ? 0 : x.numel() / width, width, width};
  if (dims == 1 || x.stride(-1) != 1 || x.stride(-2) < width) return std::nullopt;
  int64_t rows = x.size(-2);
  for (int64_t dim = dims - 3; dim >= 0; --dim) {
    if (x.stride(dim) != rows * x.stride(-2)) return std::nullopt;
    rows *= x.size(dim);
  }
  return RowLayout{rows, width, x.stride(-2)};
}

std::tuple<at::Tensor, at::Tensor> in_one_layout(const at::Tensor& a, const at::Tensor& b) {
  const auto layout = row_layout(a);
  if (layout && layout == row_layout(b)) return {a, b};
  return {a.contiguous(), b.contiguous()};
}

std::tuple<at::Tensor, at::Tensor> empty_pair_like(const at::Tensor& x) {
  if (x.is_contiguous()) return {at::empty(x.sizes(), x.options()), at::empty(x.sizes(), x.options())};
  auto sizes = x.sizes().vec();
  sizes.back() *= 2;
  const auto both = at::empty(sizes, x.options());
  return {both.narrow(-1, 0, x.size(-1)), both.narrow(-1, x.size(-1), x.size(-1))};
}

std::vector<at::Tensor> parts_of(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    parts.push_back(whole.narrow(dim, first, size));
    first += size;
  }
  return parts;
}

namespace {

int64_t sum_of_widths(at::TensorList columns) {
  int64_t width = 0;
  for (const auto& each : columns) width += each.size(-1);
  return width;
}

}  // namespace

bool are_side_by_side(at::TensorList columns) {
  bool beside = true;
  int64_t offset = columns[0].storage_offset(), stride = sum_of_widths(columns);
  for (int64_t dim = columns[0].dim() - 2; dim >= 0; --dim) {
    for (const auto& each : columns) beside &= each.stride(dim) == stride;
    stride *= columns[0].size(dim);
  }
  for (const auto& each : columns) {
    beside &= each.stride(-1) == 1 && each.is_alias_of(columns[0]) && each.storage_offset() == offset;
    offset += each.size(-1);
  }
  return beside;
}

at::Tensor joined_columns(at::TensorList columns) {
  const int64_t width = sum_of_widths(columns);
  const int64_t rows = c10::multiply_integers(columns[0].sizes().slice(0, columns[0].dim() - 1));
  if (are_side_by_side(columns)) return columns[0].as_strided({rows, width}, {width, 1});
  std::vector<at::Tensor> flat;
  for (const auto& each : columns) flat.push_back(each.reshape({rows, each.size(-1)}));
  return at::cat(flat, 1);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor heads_of(const at::Tensor& columns, int64_t head_dim) {
  return columns.view({columns.size(0), columns.size(1), -1, head_dim});
}

/// Rotates queries and keys, which are adjacent columns, together.
void rotate_in_place(const at::Tensor& q, const at::Tensor& k, int64_t head_dim, const at::Tensor& cos,
                     const at::Tensor& sin) {
  const int64_t width = q.size(-1) + k.size(-1);
  auto both = heads_of(q.as_strided({q.size(0), q.size(1), width}, q.strides()), head_dim);
  check_rotary(both, cos, sin);
  fused_operators().rotate_to(both, cos, sin, /*back=*/false, both);
}

struct RotateColumns : torch::autograd::Function<RotateColumns> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cos, const at::Tensor& sin, int64_t head_dim) {
    context->save_for_backward({cos, sin});
    context->saved_data["head_dim"] = head_dim;
    rotate_in_place(q, k, head_dim, cos, sin);
    context->mark_dirty({q, k, v});
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("rotate_columns_");
    const auto saved = context->get_saved_variables();
    const int64_t head_dim = context->saved_data["head_dim"].toInt();
    std::vector<int64_t> widths;
    int64_t width = 0;
    for (const auto& grad : grads) {
      widths.push_back(grad.size(-1));
      width += grad.size(-1);
    }
    const auto whole = at::empty({grads[0].size(0), grads[0].size(1), width}, grads[0].options());
    auto parts = parts_of(whole, -1, widths);
    for (const size_t i : {0, 1}) {
      const auto grad = grads[i].stride(-1) == 1 ? grads[i] : grads[i].contiguous();
      auto turned = heads_of(parts[i], head_dim);
      fused_operators().rotate_to(heads_of(grad, head_dim), saved[0], saved[1], /*back=*/true, turned);
    }
    parts[2].copy_(grads[2]);
    return {parts[0], parts[1], parts[2], Variable(), Variable(), Variable()};
  }
};

}  // namespace

bool can_rotate_columns(at::TensorList columns, const at::Tensor& cos) {
  return has_kernel(fused_operators().rotate_to, cos) && columns[0].scalar_type() == cos.scalar_type() &&
         columns[0].device() == cos.device() && are_side_by_side(columns);
}

std::vector<at::Tensor> rotate_columns_(at::TensorList columns, int64_t head_dim, const at::Tensor& cos,
                                        const at::Tensor& sin) {
  variable_list turned(columns.begin(), columns.end());
  if (at::GradMode::is_enabled()) {
    turned = RotateColumns::apply(columns[0], columns[1], columns[2], cos.contiguous(), sin.contiguous(), head_dim);
  } else {
    rotate_in_place(columns[0], columns[1], head_dim, cos.contiguous(), sin.contiguous());
  }
  for (auto& each : turned) each = heads_of(each, head_dim);
  return turned;
}

}  // namespace megashard
