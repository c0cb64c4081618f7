#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>

#include "framework/objectives/preferences.h"

namespace megashard {
namespace {

struct KtoOptions {
  double beta, desirable, undesirable;
};

/// Answers that are good or bad by themselves (arXiv:2402.01306; TRL's KTOTrainer, loss_type "kto"). Sequences
/// alternate: an answer, then the same prompt with an answer to another one, from which the distance to the reference
/// is estimated, over the micro batches of all ranks. `desirable` [sequences] is 1 for good answers.
class Kto final : public Objective {
 public:
  explicit Kto(const KtoOptions& options) : options_(options) {}

  std::vector<std::string> columns() const override { return {kLossMask, kLabelCounts, kRefLogProbs, kDesirable}; }
  int64_t rows_per_term() const override { return 2; }
  at::Tensor count(const Batch& whole) const override { return pair_count(whole); }

  Loss operator()(const LossInputs& in) const override {
    const Sequences sequences(in.batch);
    const auto halves = [](const at::Tensor& x) {
      return std::pair{x.view({-1, 2}).select(1, 0), x.view({-1, 2}).select(1, 1)};
    };
    const auto [ratios, mismatched] =
        halves(sequences.sums((-in.token_losses - in.batch.at(kRefLogProbs)) * in.batch.at(kLossMask)));
    const at::Tensor distance = in.mean_over_ranks(mismatched.detach().mean()).clamp_min(0);
    const at::Tensor is_good = halves(in.batch.at(kDesirable)).first > 0.5;
    const at::Tensor beyond = options_.beta * (ratios - distance);
    const at::Tensor losses = at::where(is_good, options_.desirable * (1 - at::sigmoid(beyond)),
                                        options_.undesirable * (1 - at::sigmoid(-beyond)));
    const at::Tensor rewards = options_.beta * ratios.detach();
    const auto reward = [&](const char* name, const at::Tensor& of) {
      return MetricSum{.name = name, .sum = (rewards * of).sum().to(at::kDouble), .count = of.sum().to(at::kDouble)};
    };
    return {.sum = losses.sum() / sequences.ranks(),
            .metrics = {mean_metric("kto loss", losses), reward("rewards/chosen", is_good),
                        reward("rewards/rejected", is_good.logical_not()), mean_metric("kl", distance)}};
  }

 private:
  static constexpr const char* kDesirable = "desirable";
  KtoOptions options_;
};

const RegisterObjective kRegisteredKto(
    {.name = "kto",
     .options = {{.flag = "--kto-beta",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1e3,
                  .help = "how strongly --objective kto keeps the model near the reference (TRL's beta)"},
                 {.flag = "--kto-desirable-weight",
                  .initial = 1,
                  .least = 0,
                  .most = 1e3,
                  .help = "weight of good answers (TRL's desirable_weight)"},
                 {.flag = "--kto-undesirable-weight",
                  .initial = 1,
                  .least = 0,
                  .most = 1e3,
                  .help = "weight of bad answers (TRL's undesirable_weight)"}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<Kto>(KtoOptions{options[0], options[1], options[2]});
     }});

}  // namespace
}  // namespace megashard
