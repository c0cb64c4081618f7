#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_sigmoid.h>

#include "framework/objectives/objectives.h"

namespace megashard {
namespace {

/// Direct preference optimisation with a sigmoid (arXiv:2305.18290; TRL's DPOTrainer, loss_type "sigmoid"). Rows
/// alternate: a chosen answer, then the rejected one. ref_log_probs [B, T] are the reference model's log-probabilities
/// of the labels; loss_mask marks the answers.
class Dpo final : public Objective {
 public:
  explicit Dpo(double beta) : beta_(beta) {}

  std::vector<std::string> columns() const override { return {kLossMask, kRefLogProbs}; }
  int64_t rows_per_term() const override { return 2; }
  at::Tensor count(const Batch& whole) const override {
    const at::Tensor& mask = whole.at(kLossMask);
    return at::full({}, static_cast<double>(mask.size(0) / 2), mask.options());
  }

  Loss operator()(const at::Tensor& token_losses, const Batch& batch) const override {
    const at::Tensor& mask = batch.at(kLossMask);
    const auto pairs = [&](const at::Tensor& log_ratios) {  // [pairs, 2] sums over the rows
      return sum_over_sequence((log_ratios * mask).sum(1), batch.sequence).view({-1, 2}) * beta_;
    };
    const at::Tensor rewards = pairs(-token_losses - batch.at(kRefLogProbs));
    const at::Tensor chosen = rewards.select(1, 0), rejected = rewards.select(1, 1), margins = chosen - rejected;
    const at::Tensor losses = -at::log_sigmoid(margins);
    const int ranks = batch.sequence.is_whole() ? 1 : batch.sequence.group->size();  // each has all of the rows' sums
    const at::Tensor count = at::full({}, static_cast<double>(margins.size(0)), margins.options().dtype(at::kDouble));
    const auto metric = [&](const char* name, const at::Tensor& each) {
      return MetricSum{.name = name, .sum = each.detach().sum().to(at::kDouble), .count = count};
    };
    return {
        .sum = losses.sum() / ranks,
        .metrics = {metric("dpo loss", losses), metric("rewards/chosen", chosen), metric("rewards/rejected", rejected),
                    metric("rewards/margins", margins), metric("rewards/accuracies", margins > 0)}};
  }

 private:
  static constexpr const char* kRefLogProbs = "ref_log_probs";
  double beta_;
};

const RegisterObjective kRegisteredDpo(
    {.name = "dpo",
     .options = {{.flag = "--dpo-beta",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1e3,
                  .help = "how strongly --objective dpo keeps the model near the reference (TRL's beta)"}},
     .make = [](const std::vector<double>& options) { return std::make_unique<Dpo>(options[0]); }});

}  // namespace
}  // namespace megashard
