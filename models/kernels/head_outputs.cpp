#include "models/kernels/head_outputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sub.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "models/kernels/cross_entropy.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/head_parts.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::Tensor sum_of_pieces(at::Tensor of_piece, const ProcessGroupPtr& ranks) {
  if (ranks != nullptr && ranks->size() > 1) ranks->all_reduce(of_piece, ReduceOp::kSum).wait();
  return of_piece;
}

/// Adds weights [rows, n] to the entries [rows, n] of grad; of other ranks' tokens nothing.
void add_at(const at::Tensor& grad, const at::Tensor& tokens, const at::Tensor& weights) {
  grad.scatter_add_(1, tokens.clamp_min(0), weights * tokens.ge(0));
}

/// What of the logits is needed, for tokens in rows.
struct Questions {
  at::Tensor labels;  // [rows], relative to this rank's vocabulary shard
  at::Tensor chosen;  // [rows, K], the same; K 0: none
  bool entropies;

  bool has_chosen() const { return chosen.size(1) > 0; }

  Questions part(int64_t row, int64_t count) const {
    return {labels.narrow(0, row, count), chosen.narrow(0, row, count), entropies};
  }
};

struct Numbers {
  at::Tensor losses, log_sums, entropies, log_probs;  // [rows], but log_probs [rows, K]
};

Numbers numbers_of(const at::Tensor& logits, const Questions& asked, const ProcessGroupPtr& ranks) {
  const auto [losses, stats] = losses_of(logits, asked.labels, ranks);
  Numbers all{.losses = losses, .log_sums = log_sums(stats), .entropies = {}, .log_probs = {}};
  if (asked.has_chosen()) {
    const auto found = logits.gather(1, asked.chosen.clamp_min(0)).to(at::kFloat) - all.log_sums.unsqueeze(1);
    all.log_probs = sum_of_pieces(found * asked.chosen.ge(0), ranks);
  }
  if (!asked.entropies) return all;
  std::vector<at::Tensor> parts;
  for_rows(logits.size(0), rows_of(kWidenedAtOnce, logits.size(1)), [&](int64_t row, int64_t count) {
    const auto log_p =
        at::sub(logits.narrow(0, row, count).to(at::kFloat), all.log_sums.narrow(0, row, count).unsqueeze(1));
    parts.push_back(log_p.exp().mul_(log_p).sum(1).neg_());
  });
  all.entropies = sum_of_pieces(at::cat(parts), ranks);
  return all;
}

/// Overwrites soft-capped logits by the gradient of those before the cap. With log p of a token:
/// -log p(label) has p - [label], the entropy H -p (log p + H), log p(chosen) [chosen] - p.
void turn_into_gradient_(at::Tensor& logits, const Questions& asked, const Numbers& now, const Numbers& grads,
                         double softcap) {
  for_rows(logits.size(0), rows_of(kWidenedAtOnce, logits.size(1)), [&](int64_t row, int64_t count) {
    const auto rows = [&](const at::Tensor& x) { return x.narrow(0, row, count).unsqueeze(1); };
    auto target = logits.narrow(0, row, count);
    const auto capped = target.to(at::kFloat);
    const auto log_p = at::sub(capped, rows(now.log_sums));
    const auto of_loss = rows(grads.losses) * rows(asked.labels).ne(kIgnoredLabel);
    auto grad = log_p.exp();
    auto factor = of_loss;
    if (asked.has_chosen()) factor = factor - grads.log_probs.narrow(0, row, count).sum(1, /*keepdim=*/true);
    if (asked.entropies) {
      grad.mul_(factor - rows(grads.entropies) * (log_p + rows(now.entropies)));
    } else {
      grad.mul_(factor);
    }
    add_at(grad, rows(asked.labels), -of_loss);
    if (asked.has_chosen()) add_at(grad, asked.chosen.narrow(0, row, count), grads.log_probs.narrow(0, row, count));
    if (softcap != 0) grad.mul_(1 - (capped / softcap).square());
    target.copy_(grad);
  });
}

at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& weight, double softcap) {
  return soft_capped(linear(hidden, weight, at::Tensor()), softcap);
}

/// Losses, and entropies and log-probabilities if they are asked for. Recomputes the logits in backward.
struct HeadOutputsFunction : Function<HeadOutputsFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& labels, const at::Tensor& chosen, bool entropies,
                               const ProcessGroupPtr& ranks, int64_t rows_at_once, double softcap) {
    const Questions asked{labels, chosen, entropies};
    std::vector<at::Tensor> losses, sums, of_entropies, log_probs;
    for_rows(hidden.size(0), rows_at_once, [&](int64_t row, int64_t count) {
      const auto part =
          numbers_of(logits_of(hidden.narrow(0, row, count), weight, softcap), asked.part(row, count), ranks);
      losses.push_back(part.losses);
      sums.push_back(part.log_sums);
      if (entropies) of_entropies.push_back(part.entropies);
      if (asked.has_chosen()) log_probs.push_back(part.log_probs);
    });
    variable_list results{at::cat(losses)}, saved{hidden, weight, labels, at::cat(sums)};
    if (entropies) {
      results.push_back(at::cat(of_entropies));
      saved.push_back(results.back());
    }
    saved.push_back(chosen);
    if (asked.has_chosen()) results.push_back(at::cat(log_probs));
    context->save_for_backward(saved);
    context->saved_data["entropies"] = entropies;
    context->saved_data["rows_at_once"] = rows_at_once;
    context->saved_data["softcap"] = softcap;
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("linear_head_outputs");
    const auto saved = context->get_saved_variables();
    const auto &hidden = saved[0], &weight = saved[1];
    const bool entropies = context->saved_data["entropies"].toBool();
    const double softcap = context->saved_data["softcap"].toDouble();
    const Questions asked{saved[2], saved.back(), entropies};
    const auto narrowed = [](const at::Tensor& x, int64_t row, int64_t count) {
      return x.defined() ? x.narrow(0, row, count) : x;
    };
    const auto of_entropies = entropies ? grads[1] : at::Tensor();
    const auto of_log_probs = asked.has_chosen() ? grads.back() : at::Tensor();
    HeadGradients gradients(hidden, weight, context->needs_input_grad(0), context->needs_input_grad(1));
    for_rows(hidden.size(0), context->saved_data["rows_at_once"].toInt(), [&](int64_t row, int64_t count) {
      const auto some = hidden.narrow(0, row, count);
      auto logits = logits_of(some, weight, softcap);
      const Numbers now{.losses = {},
                        .log_sums = saved[3].narrow(0, row, count),
                        .entropies = narrowed(entropies ? saved[4] : at::Tensor(), row, count),
                        .log_probs = {}};
      const Numbers own{.losses = grads[0].narrow(0, row, count),
                        .log_sums = {},
                        .entropies = narrowed(of_entropies, row, count),
                        .log_probs = narrowed(of_log_probs, row, count)};
      turn_into_gradient_(logits, asked.part(row, count), now, own, softcap);
      gradients.add(logits, some, row);
    });
    variable_list results(8);
    results[0] = gradients.of_hidden();
    results[1] = gradients.of_weight();
    return results;
  }
};

}  // namespace

HeadOutputs linear_head_outputs(const at::Tensor& hidden, const at::Tensor& weight, const HeadQuestion& question,
                                const ProcessGroupPtr& ranks, std::optional<int64_t> at_once, double softcap) {
  const int64_t width = weight.size(0), vocabulary = width * (ranks == nullptr ? 1 : ranks->size());
  const auto states = hidden.reshape({-1, hidden.size(-1)});
  const auto labels = labels_of_piece(flat_labels(question.labels, vocabulary), width, ranks);
  at::Tensor chosen = at::empty({labels.size(0), 0}, labels.options());  // [rows, K]
  if (question.chosen.defined()) {
    const int64_t tokens = question.chosen.size(0);
    const auto flat = flat_labels(question.chosen, vocabulary).view({tokens, -1}).t().contiguous();
    chosen = labels_of_piece(flat, width, ranks);
  }
  const int64_t most = rows_of(at_once.value_or(logits_at_once(hidden.device())), width);
  const auto found = HeadOutputsFunction::apply(states, weight, labels, chosen, question.entropies, ranks,
                                                rows_of_part(states.size(0), most), softcap);
  const auto sizes = question.labels.sizes();
  HeadOutputs outputs{.losses = found[0].view(sizes), .entropies = {}, .log_probs = {}};
  if (question.entropies) outputs.entropies = found[1].view(sizes);
  if (question.chosen.defined()) outputs.log_probs = found.back().t().reshape(question.chosen.sizes());
  return outputs;
}

}  // namespace megashard
