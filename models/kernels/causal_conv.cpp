#include "models/kernels/causal_conv.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

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

struct CausalConv : torch::autograd::Function<CausalConv> {
  static Variable forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& begins_or_none) {
    const auto begins = begins_or_none.value_or(at::Tensor());
    context->save_for_backward({x, weight, begins});
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
  return CausalConv::apply(x, weight, begins.defined() ? std::optional(begins) : std::nullopt);
}

}  // namespace megashard
