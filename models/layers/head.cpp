#include "models/layers/head.h"

#include "models/kernels/fused_ops.h"

namespace megashard {

at::Tensor Head::own_weight() const { return tied_ ? with_own_gradient(weight) : weight; }

at::Tensor Head::forward(const at::Tensor& x) { return product(x, own_weight(), bias); }

TokenLosses Head::token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                               std::optional<int64_t> at_once) {
  const auto group = ranks()->size() == 1 ? nullptr : ranks()->group();
  if (!is_plain() || bias.defined()) return {vocab_parallel_cross_entropy(forward(x), labels, group), {}};
  return linear_cross_entropy(x, own_weight(), labels, group, loss_weights, at_once);
}

}  // namespace megashard
