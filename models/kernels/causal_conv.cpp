#include "models/kernels/causal_conv.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "models/kernels/cpu_kernels.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Pairs each token with the one `distance` tokens before it.
class Tap {
 public:
  Tap(const at::Tensor& like, const at::Tensor& begins, int64_t distance)
      : distance_(distance), length_(std::max<int64_t>(like.size(1) - distance, 0)) {
    if (!begins.defined() || distance == 0 || length_ == 0) return;
    const auto earlier = at::arange(length_, begins.options());
    seen_ =
        earlier.ge(begins.narrow(1, distance, length_)).unsqueeze(-1).to(like.scalar_type());  // [B, T - distance, 1]
  }

  bool is_empty() const { return length_ == 0; }
  at::Tensor later(const at::Tensor& x) const { return x.narrow(1, distance_, length_); }
  /// The earlier token of each pair; zero if it belongs to another document.
  at::Tensor earlier(const at::Tensor& x) const { return masked(x.narrow(1, 0, length_)); }
  /// Zeroes the pairs that cross a document's begin.
  at::Tensor masked(const at::Tensor& x) const { return seen_.defined() ? x * seen_ : x; }

 private:
  int64_t distance_, length_;
  at::Tensor seen_;
};

/// fp32 on a CPU.
bool is_by_kernel(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat && x.numel() > 0; }

kernels::ConvShape shape_of(const at::Tensor& x, const at::Tensor& taps, const at::Tensor& begins) {
  return {x.size(0),
          x.size(1),
          x.size(2),
          taps.size(0),
          x.stride(0),
          x.stride(1),
          begins.defined() ? begins.const_data_ptr<int64_t>() : nullptr};
}

/// Weights [C, K] as taps [K, C], that of a token itself first.
at::Tensor taps_of(const at::Tensor& weight) { return weight.t().flip(0).contiguous(); }

struct CausalConv : torch::autograd::Function<CausalConv> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& begins_or_none) {
    const auto x = input.stride(-1) == 1 ? input : input.contiguous();
    const auto begins = begins_or_none ? begins_or_none->contiguous() : at::Tensor();
    context->save_for_backward({x, weight, begins});
    if (is_by_kernel(x)) {
      const auto taps = taps_of(weight), y = at::empty(x.sizes(), x.options());
      kernels::causal_conv(x.const_data_ptr<float>(), taps.const_data_ptr<float>(), y.mutable_data_ptr<float>(),
                           shape_of(x, taps, begins));
      return y;
    }
    const int64_t last = weight.size(1) - 1;
    auto y = x * weight.select(1, last);
    for (int64_t distance = 1; distance <= last; ++distance) {
      const Tap tap(x, begins, distance);
      if (!tap.is_empty()) tap.later(y).addcmul_(tap.earlier(x), weight.select(1, last - distance));
    }
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("causal_conv");
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &grad = grads[0];
    if (is_by_kernel(x)) {
      const auto taps = taps_of(weight), of_y = grad.contiguous();
      const auto of_input = at::empty(x.sizes(), x.options()), of_each = at::empty_like(taps);
      kernels::causal_conv_backward(of_y.const_data_ptr<float>(), x.const_data_ptr<float>(),
                                    taps.const_data_ptr<float>(), of_input.mutable_data_ptr<float>(),
                                    of_each.mutable_data_ptr<float>(), shape_of(x, taps, saved[2]));
      return {of_input, of_each.flip(0).t(), Variable()};
    }
    const int64_t last = weight.size(1) - 1;
    auto of_x = grad * weight.select(1, last);
    std::vector<at::Tensor> of_taps(static_cast<size_t>(last + 1));
    of_taps.back() = (grad * x).sum(at::IntArrayRef{0, 1});
    for (int64_t distance = 1; distance <= last; ++distance) {
      auto& of_tap = of_taps[static_cast<size_t>(last - distance)];
      const Tap tap(x, saved[2], distance);
      if (tap.is_empty()) {
        of_tap = at::zeros_like(of_taps.back());
        continue;
      }
      const auto later = tap.masked(tap.later(grad));
      of_tap = (later * x.narrow(1, 0, later.size(1))).sum(at::IntArrayRef{0, 1});
      of_x.narrow(1, 0, later.size(1)).addcmul_(later, weight.select(1, last - distance));
    }
    return {of_x, at::stack(of_taps, 1), Variable()};
  }
};

}  // namespace

at::Tensor causal_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& begins) {
  if (x.is_cpu() && at::isReducedFloatingType(x.scalar_type()))
    return causal_conv(x.to(at::kFloat), weight.to(at::kFloat), begins).to(x.scalar_type());
  return CausalConv::apply(x, weight, begins.defined() ? std::optional(begins) : std::nullopt);
}

}  // namespace megashard
