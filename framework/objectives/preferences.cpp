#include "framework/objectives/preferences.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>

namespace megashard {

Pairs in_pairs(const at::Tensor& of_sequences) {
  const at::Tensor pairs = of_sequences.view({-1, 2});
  return {pairs.select(1, 0), pairs.select(1, 1)};
}

MetricSum mean_metric(std::string name, const at::Tensor& each) {
  return {.name = std::move(name),
          .sum = each.detach().sum().to(at::kDouble),
          .count = at::full({}, static_cast<double>(each.numel()), each.options().dtype(at::kDouble))};
}

at::Tensor pair_count(const Batch& whole) {
  const at::Tensor& counts = whole.at(kLabelCounts);
  return at::full({}, static_cast<double>(counts.size(0) / 2), counts.options());
}

Pairs PreferenceObjective::sums(const at::Tensor& x, const LossInputs& in, const Sequences& sequences) {
  return in_pairs(sequences.sums(x * in.batch.at(kLossMask)));
}

Pairs PreferenceObjective::means(const Pairs& sums, const Sequences& sequences) {
  const Pairs tokens = in_pairs(sequences.label_counts().clamp_min(1));
  return {sums.chosen / tokens.chosen, sums.rejected / tokens.rejected};
}

at::Tensor PreferenceObjective::tokens_of_chosen(const Batch& batch) const {
  const Sequences sequences(batch);
  const at::Tensor& mask = batch.at(kLossMask);
  const at::Tensor counted = of_texts_ ? batch.at(kTokenMask).to(mask.scalar_type()) : mask;
  const at::Tensor number = at::arange(sequences.label_counts().size(0), mask.options());
  return counted * sequences.of_tokens(1 - at::remainder(number, 2));
}

at::Tensor PreferenceObjective::count(const Batch& whole) const {
  const at::Tensor pairs = pair_count(whole);
  return added_ == 0 ? pairs : at::stack({pairs, tokens_of_chosen(whole).sum()});
}

Loss PreferenceObjective::operator()(const LossInputs& in) const {
  const Sequences sequences(in.batch);
  const Terms of = terms(in, sequences);
  const auto& [chosen, rejected] = of.rewards;
  Loss loss{.sum = of.losses.sum() / sequences.ranks(),
            .metrics = {mean_metric(name_ + " loss", of.losses), mean_metric("rewards/chosen", chosen),
                        mean_metric("rewards/rejected", rejected), mean_metric("rewards/margins", chosen - rejected),
                        mean_metric("rewards/accuracies", chosen > rejected)}};
  if (added_ == 0) return loss;
  const at::Tensor mask = tokens_of_chosen(in.batch), added = (in.token_losses * mask).sum();
  loss.sum = at::stack({loss.sum, added * added_});
  loss.metrics.push_back(
      {.name = "nll_loss", .sum = added.detach().to(at::kDouble), .count = mask.sum().to(at::kDouble)});
  return loss;
}

}  // namespace megashard
