#include "models/kernels/rotate_columns.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/column_parts.h"
#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
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
