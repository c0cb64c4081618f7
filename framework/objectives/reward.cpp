#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/ones_like.h>

#include "framework/objectives/preferences.h"

namespace megashard {
namespace {

/// Bradley and Terry's model of preferences (TRL's RewardTrainer): the score of an answer is that of its last token.
/// Sequences alternate: a chosen answer, then the rejected one. `margin` [sequences], if the data have it: how much
/// better the chosen answer is; that of the rejected one is not read.
class Reward final : public Objective {
 public:
  explicit Reward(double center) : center_(center) {}

  std::vector<std::string> columns() const override { return {kLossMask, kLabelCounts}; }
  Needs needs() const override { return {.values = true, .last_tokens = true}; }
  int64_t rows_per_term() const override { return 2; }
  at::Tensor count(const Batch& whole) const override { return pair_count(whole); }

  Loss operator()(const LossInputs& in) const override {
    const Sequences sequences(in.batch);
    const at::Tensor scores = sequences.sums(in.values * in.batch.at(kLossMask));
    const auto [chosen, rejected] = in_pairs(scores);
    at::Tensor better = chosen - rejected;
    if (const at::Tensor margins = in.batch.find("margin"); margins.defined())
      better = better - in_pairs(margins).chosen;
    at::Tensor losses = -at::log_sigmoid(better);
    if (center_ != 0) losses = losses + center_ * (chosen + rejected).square();
    const at::Tensor all = scores.detach().to(at::kDouble);
    const auto once = [](const char* name, const at::Tensor& of_batch) {
      return MetricSum{.name = name, .sum = of_batch, .count = at::ones_like(of_batch)};
    };
    return {.sum = losses.sum() / sequences.ranks(),
            .metrics = {mean_metric("reward loss", losses), once("min_reward", all.min()),
                        mean_metric("mean_reward", scores), once("max_reward", all.max()),
                        mean_metric("accuracy", chosen > rejected), mean_metric("margin", chosen - rejected)}};
  }

 private:
  double center_;
};

const RegisterObjective kRegisteredReward(
    {.name = "reward",
     .options = {{.flag = "--reward-center-coefficient",
                  .least = 0,
                  .most = 1e3,
                  .help = "adds so much of the square of a pair's sum of scores (TRL's center_rewards_coefficient)"}},
     .make = [](const std::vector<double>& options) { return std::make_unique<Reward>(options[0]); }});

}  // namespace
}  // namespace megashard
