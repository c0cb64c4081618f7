#include "models/kernels/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "models/kernels/fused_operators.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/head_parts.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

LossAndStats cross_entropy_by_operators(const at::Tensor& logits, const at::Tensor& labels) {
  auto loss = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  auto stats = at::empty_like(loss);
  for_rows(logits.size(0), rows_of(kWidenedAtOnce, logits.size(1)), [&](int64_t row, int64_t count) {
    const auto chunk = logits.narrow(0, row, count).to(at::kFloat);
    const auto label = labels.narrow(0, row, count);
    const auto valid = label.ge(0);
    const auto sum = at::logsumexp(chunk, 1);
    const auto at_label = chunk.gather(1, label.clamp_min(0).unsqueeze(1)).squeeze(1);
    loss.narrow(0, row, count).copy_((sum - at_label) * valid);
    stats.narrow(0, row, count).copy_(sum);
  });
  return {loss, stats};
}

void cross_entropy_backward_by_operators_(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& stats,
                                          const at::Tensor& grad_loss) {
  for_rows(logits.size(0), rows_of(kWidenedAtOnce, logits.size(1)), [&](int64_t row, int64_t count) {
    auto target = logits.narrow(0, row, count);
    const auto label = labels.narrow(0, row, count).unsqueeze(1);
    const auto scale = (grad_loss.narrow(0, row, count).unsqueeze(1)) * label.ne(kIgnoredLabel);
    auto grad = at::sub(target.to(at::kFloat), stats.narrow(0, row, count).unsqueeze(1)).exp_().mul_(scale);
    grad.scatter_add_(1, label.clamp_min(0), scale.neg() * label.ge(0));
    target.copy_(grad);
  });
}

/// Combines vocabulary shards: the loss on all ranks, and the sum of all exponentials.
LossAndStats combine_pieces(const at::Tensor& loss, const at::Tensor& stats, const at::Tensor& labels,
                            ProcessGroup& ranks) {
  const bool by_kernel = stats.dim() == 2;
  const auto own = log_sums(stats);
  const auto sums = at::empty({ranks.size() * own.numel()}, own.options());
  ranks.all_gather_into(sums, own).wait();
  const auto whole = at::logsumexp(sums.view({ranks.size(), -1}), 0);
  const auto losses = (loss + (whole - own)) * labels.ge(0);
  ranks.all_reduce(losses, ReduceOp::kSum).wait();
  return {losses, by_kernel ? at::stack({whole, at::zeros_like(whole)}, 1) : whole};
}

}  // namespace

LossAndStats losses_of(const at::Tensor& logits, const at::Tensor& labels, const ProcessGroupPtr& ranks) {
  const auto& fused = fused_operators().cross_entropy;
  const auto [loss, stats] =
      has_kernel(fused, logits) ? fused(logits, labels) : cross_entropy_by_operators(logits, labels);
  if (ranks == nullptr || ranks->size() == 1) return {loss, stats};
  return combine_pieces(loss, stats, labels, *ranks);
}

namespace {

/// Overwrites soft-capped logits by the gradient of those before the cap.
void turn_into_gradient(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& stats,
                        const at::Tensor& grad_loss, double softcap) {
  const auto slope = softcap == 0 ? at::Tensor() : 1 - (logits / softcap).square();
  const auto& fused = fused_operators().cross_entropy_backward_;
  if (has_kernel(fused, logits)) {
    fused(logits, labels, stats, grad_loss);
  } else {
    cross_entropy_backward_by_operators_(logits, labels, stats, grad_loss);
  }
  if (slope.defined()) logits.mul_(slope);
}

void require_first_backward(AutogradContext& context) {
  TORCH_CHECK(context.saved_data.count("consumed") == 0,
              "the loss was already differentiated, and its logits are overwritten by their gradient: call backward "
              "once, without retain_graph");
  context.saved_data["consumed"] = true;
}

struct CrossEntropyFunction : Function<CrossEntropyFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& all_labels,
                          const ProcessGroupPtr& ranks) {
    const auto logits = input.contiguous();
    const auto labels = labels_of_piece(all_labels, logits.size(1), ranks);
    const auto [loss, stats] = losses_of(logits, labels, ranks);
    context->save_for_backward({logits, labels, stats});
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("token_cross_entropy");
    require_first_backward(*context);
    const auto saved = context->get_saved_variables();
    auto logits = saved[0].detach();  // becomes the gradient
    turn_into_gradient(logits, saved[1], saved[2], grads[0].contiguous(), /*softcap=*/0);
    return {logits, Variable(), Variable()};
  }
};

/// The head's tokens, labels relative to its vocabulary shard, and the number of tokens per part.
struct HeadRows {
  at::Tensor hidden, weight, labels;
  ProcessGroupPtr ranks;
  int64_t at_once;
  double softcap;

  /// Losses of all tokens; calls body(row, count, logits, stats) after each part.
  template <class Body>
  at::Tensor losses(const Body& body) const {
    std::vector<at::Tensor> all;
    for_rows(hidden.size(0), at_once, [&](int64_t row, int64_t count) {
      auto logits = soft_capped(linear(hidden.narrow(0, row, count), weight, at::Tensor()), softcap);
      auto [loss, stats] = losses_of(logits, labels.narrow(0, row, count), ranks);
      all.push_back(std::move(loss));
      body(row, count, logits, stats);
    });
    return at::cat(all);
  }
};

/// Recomputes the logits in backward.
struct LinearCrossEntropyFunction : Function<LinearCrossEntropyFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                          const at::Tensor& all_labels, const ProcessGroupPtr& ranks, int64_t rows_at_once,
                          double softcap) {
    const HeadRows rows{hidden, weight,       labels_of_piece(all_labels, weight.size(0), ranks),
                        ranks,  rows_at_once, softcap};
    std::vector<at::Tensor> stats;
    const auto losses =
        rows.losses([&](int64_t, int64_t, const at::Tensor&, const at::Tensor& each) { stats.push_back(each); });
    context->save_for_backward({hidden, weight, rows.labels, at::cat(stats)});
    context->saved_data["rows_at_once"] = rows_at_once;
    context->saved_data["softcap"] = softcap;
    return losses;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("linear_cross_entropy");
    const auto saved = context->get_saved_variables();
    const auto &hidden = saved[0], &weight = saved[1], &labels = saved[2], &stats = saved[3];
    const auto grad_loss = grads[0].contiguous();
    const double softcap = context->saved_data["softcap"].toDouble();
    HeadGradients gradients(hidden, weight, context->needs_input_grad(0), context->needs_input_grad(1));
    for_rows(hidden.size(0), context->saved_data["rows_at_once"].toInt(), [&](int64_t row, int64_t count) {
      const auto some = hidden.narrow(0, row, count);
      auto logits = soft_capped(linear(some, weight, at::Tensor()), softcap);
      turn_into_gradient(logits, labels.narrow(0, row, count), stats.narrow(0, row, count),
                         grad_loss.narrow(0, row, count), softcap);
      gradients.add(logits, some, row);
    });
    return {gradients.of_hidden(), gradients.of_weight(), Variable(), Variable(), Variable(), Variable()};
  }
};

/// Multiplies a gradient by `factor` in place. 16-bit values are multiplied in fp32, in parts.
at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor) {
  if (!gradient.defined()) return gradient;
  const at::Tensor result = gradient.detach();
  if (result.scalar_type() == at::kFloat) return result.mul_(factor);
  constexpr int64_t kAtOnce = int64_t{1} << 24;
  const at::Tensor flat = result.view({-1});
  for (int64_t begin = 0; begin < flat.numel(); begin += kAtOnce) {
    const at::Tensor part = flat.narrow(0, begin, std::min(kAtOnce, flat.numel() - begin));
    part.copy_(part.to(at::kFloat).mul_(factor));
  }
  return result;
}

/// Computes the losses, their weighted sum, and the gradients of that sum.
struct WeightedLinearCrossEntropyFunction : Function<WeightedLinearCrossEntropyFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& all_labels, const at::Tensor& weights, const ProcessGroupPtr& ranks,
                               int64_t rows_at_once, double softcap) {
    const HeadRows rows{hidden, weight,       labels_of_piece(all_labels, weight.size(0), ranks),
                        ranks,  rows_at_once, softcap};
    HeadGradients gradients(hidden, weight, hidden.requires_grad(), weight.requires_grad());
    auto losses = rows.losses([&](int64_t row, int64_t count, at::Tensor& logits, const at::Tensor& stats) {
      turn_into_gradient(logits, rows.labels.narrow(0, row, count), stats, weights.narrow(0, row, count), softcap);
      gradients.add(logits, hidden.narrow(0, row, count), row);
    });
    context->save_for_backward({gradients.of_hidden(), gradients.of_weight()});
    context->mark_non_differentiable({losses});
    return {losses, (losses * weights).sum()};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("linear_cross_entropy");
    require_first_backward(*context);
    const auto saved = context->get_saved_variables();
    return {scaled(saved[0], grads[1]),
            scaled(saved[1], grads[1]),
            Variable(),
            Variable(),
            Variable(),
            Variable(),
            Variable()};
  }
};

int64_t pieces(const ProcessGroupPtr& ranks) { return ranks == nullptr ? 1 : ranks->size(); }

void check_rows(const char* what, const at::Tensor& rows, const at::Tensor& labels) {
  TORCH_CHECK(rows.dim() >= 1 && rows.sizes().slice(0, rows.dim() - 1) == labels.sizes(), what, " ", rows.sizes(),
              " must have the sizes of the labels ", labels.sizes(), " and one dimension more");
}

}  // namespace

at::Tensor soft_capped(const at::Tensor& x, double softcap) {
  return softcap == 0 ? x : at::tanh(x / softcap) * softcap;
}

at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits, labels, nullptr);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const ProcessGroupPtr& ranks) {
  check_rows("logits", logits, labels);
  const int64_t width = logits.size(-1);
  const auto flat = flat_labels(labels, width * pieces(ranks));
  return CrossEntropyFunction::apply(logits.reshape({-1, width}), flat, ranks).view(labels.sizes());
}

TokenLosses linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                 const ProcessGroupPtr& ranks, const at::Tensor& loss_weights,
                                 std::optional<int64_t> at_once, double softcap) {
  check_rows("hidden", hidden, labels);
  const int64_t width = weight.size(0), most = rows_of(at_once.value_or(logits_at_once(hidden.device())), width);
  if (labels.numel() <= most)
    return {vocab_parallel_cross_entropy(soft_capped(linear(hidden, weight, at::Tensor()), softcap), labels, ranks),
            {}};
  const auto flat = flat_labels(labels, width * pieces(ranks));
  const auto states = hidden.reshape({-1, hidden.size(-1)});
  const int64_t rows = rows_of_part(states.size(0), most);
  const bool differentiates = at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad());
  if (!loss_weights.defined() || !differentiates) {
    return {LinearCrossEntropyFunction::apply(states, weight, flat, ranks, rows, softcap).view(labels.sizes()), {}};
  }
  const auto weights = loss_weights.reshape({-1}).contiguous();
  const auto both = WeightedLinearCrossEntropyFunction::apply(states, weight, flat, weights, ranks, rows, softcap);
  return {both[0].view(labels.sizes()), both[1]};
}

}  // namespace megashard
