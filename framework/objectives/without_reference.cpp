#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/log_sigmoid.h>

#include "framework/objectives/preferences.h"

namespace megashard {
namespace {

/// Log of the odds p / (1 - p), of log p < 0.
at::Tensor log_odds(const at::Tensor& log_p) { return log_p - at::log1p(-at::exp(log_p)); }

/// Preferences without a reference model: rewards are mean log-probabilities of the answers' tokens.
class MeanPreference : public PreferenceObjective {
 public:
  using PreferenceObjective::PreferenceObjective;

 protected:
  static Pairs mean_log_probs(const LossInputs& in, const Sequences& sequences) {
    return means(sums(-in.token_losses, in, sequences), sequences);
  }
  static Pairs scaled(const Pairs& pairs, double by) { return {pairs.chosen * by, pairs.rejected * by}; }
};

/// arXiv:2403.07691; TRL's ORPOTrainer, whose mean loss of the chosen texts counts the prompts, too.
class Orpo final : public MeanPreference {
 public:
  explicit Orpo(double beta) : MeanPreference("orpo", /*added=*/1, /*of_texts=*/true), beta_(beta) {}

 protected:
  Terms terms(const LossInputs& in, const Sequences& sequences) const override {
    const Pairs mean = mean_log_probs(in, sequences);
    const at::Tensor odds = log_odds(mean.chosen) - log_odds(mean.rejected);
    return {.losses = -beta_ * at::log_sigmoid(odds), .rewards = scaled(mean, beta_)};
  }

 private:
  double beta_;
};

/// arXiv:2405.14734; TRL's CPOTrainer with loss_type simpo and cpo_alpha 0.
class SimPo final : public MeanPreference {
 public:
  SimPo(double beta, double gamma, double smoothing)
      : MeanPreference("simpo", /*added=*/0), beta_(beta), gamma_(gamma), smoothing_(smoothing) {}

 protected:
  Terms terms(const LossInputs& in, const Sequences& sequences) const override {
    const Pairs mean = mean_log_probs(in, sequences);
    const at::Tensor x = beta_ * mean.difference() - gamma_;
    return {.losses = -(1 - smoothing_) * at::log_sigmoid(x) - smoothing_ * at::log_sigmoid(-x),
            .rewards = scaled(mean, beta_)};
  }

 private:
  double beta_, gamma_, smoothing_;
};

const RegisterObjective kRegisteredOrpo(
    {.name = "orpo",
     .options = {{.flag = "--orpo-beta",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1e3,
                  .help = "weight of the odds of a pair beside the chosen text's loss (TRL's beta)"}},
     .make = [](const std::vector<double>& options) { return std::make_unique<Orpo>(options[0]); }});

const RegisterObjective kRegisteredSimPo(
    {.name = "simpo",
     .options = {{.flag = "--simpo-beta", .initial = 2, .least = 0, .most = 1e3, .help = "scale of SimPO's rewards"},
                 {.flag = "--simpo-gamma",
                  .initial = 1,
                  .least = 0,
                  .most = 1e3,
                  .help = "margin between a pair's rewards (TRL's simpo_gamma)"},
                 {.flag = "--simpo-label-smoothing",
                  .least = 0,
                  .most = 0.49,
                  .help = "probability that a pair's answers are the wrong way round"}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<SimPo>(options[0], options[1], options[2]);
     }});

}  // namespace
}  // namespace megashard
