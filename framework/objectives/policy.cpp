#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>

#include <algorithm>
#include <iterator>

#include "framework/objectives/aggregation.h"
#include "framework/objectives/objectives.h"
#include "framework/objectives/policy_losses.h"

namespace megashard {
namespace {

/// Columns of answers that were sampled before, [B, T] float32 each, by ROLL's names.
constexpr const char* kAdvantages = "advantages";
constexpr const char* kOldLogProbs = "old_log_probs";     ///< as the sampling policy had them; absent: as now
constexpr const char* kInferLogProbs = "infer_logprobs";  ///< as the inference engine computed them
constexpr const char* kScores = "scores";                 ///< [sequences]: rewards

struct PolicyOptions {
  PolicyLossOptions loss;
  Aggregation aggregation = Aggregation::kTokenMean;
  double length = 0;  // that seq-mean-token-sum-norm divides by
  double kl = 0;
  KlEstimator estimator = KlEstimator::kK3;
  double most_weight = 0;  // bounds the correction for the inference engine; 0: no correction
  double entropy = 0;      // weight of the entropy, which is to grow
};

/// Learning from sampled answers and their advantages: the token losses of policy_losses.h, aggregated over the global
/// batch, and the divergence from a reference.
class Policy final : public Objective {
 public:
  explicit Policy(const PolicyOptions& options) : options_(options) {}

  std::vector<std::string> columns() const override {
    std::vector<std::string> names{kLossMask, kLabelCounts, kAdvantages};
    if (options_.kl != 0) names.emplace_back(kRefLogProbs);
    if (options_.most_weight != 0) names.emplace_back(kInferLogProbs);
    if (options_.loss.loss == PolicyLoss::kTopr) names.emplace_back(kScores);
    return names;
  }
  Needs needs() const override { return {.asked = {.entropies = options_.entropy != 0}}; }
  bool is_over_global_batch() const override { return true; }
  at::Tensor count(const Batch& whole) const override { return aggregation_count(options_.aggregation, whole); }

  Loss operator()(const LossInputs& in) const override {
    const Sequences sequences(in.batch);
    const PolicyTokens tokens = tokens_of(in, sequences);
    const PolicyTerms terms = policy_terms(options_.loss, tokens, sequences);
    at::Tensor losses = terms.losses;
    const at::Tensor inferred = in.batch.find(kInferLogProbs);
    if (options_.most_weight != 0) losses = losses * (tokens.old - inferred).exp().clamp(0, options_.most_weight);

    const at::Tensor labels = tokens.mask.sum().to(at::kDouble), now = tokens.log_probs.detach();
    const auto mean = [&](const char* name, const at::Tensor& each) {
      return MetricSum{.name = name, .sum = (each.detach() * tokens.mask).sum().to(at::kDouble), .count = labels};
    };
    std::vector<MetricSum> metrics{mean("ppo_kl", tokens.old - now)};
    if (terms.clipped.defined()) metrics.push_back(mean("clip_fraction", terms.clipped));
    if (inferred.defined()) {
      const at::Tensor ratio = now - inferred;
      metrics.push_back(mean("mismatch_kl", ratio.exp() - ratio - 1));
    }
    if (options_.kl != 0) {
      const at::Tensor kl = kl_terms(options_.estimator, tokens.log_probs, in.batch.at(kRefLogProbs));
      losses = losses + options_.kl * kl;
      metrics.push_back(mean("kl_loss", kl));
    }
    if (options_.entropy != 0) {
      losses = losses - options_.entropy * in.entropies;
      metrics.push_back(mean("entropy", in.entropies));
    }
    Loss whole = aggregated_loss("policy loss", options_.aggregation, options_.length, losses, in.batch);
    std::ranges::move(metrics, std::back_inserter(whole.metrics));
    return whole;
  }

 private:
  PolicyTokens tokens_of(const LossInputs& in, const Sequences& sequences) const {
    const at::Tensor log_probs = -in.token_losses, old = in.batch.find(kOldLogProbs);
    PolicyTokens tokens{.log_probs = log_probs,
                        .old = old.defined() ? old : log_probs.detach(),
                        .advantages = in.batch.at(kAdvantages),
                        .mask = in.batch.at(kLossMask),
                        .scores = {}};
    if (options_.loss.loss == PolicyLoss::kTopr) tokens.scores = sequences.of_tokens(in.batch.at(kScores));
    return tokens;
  }

  PolicyOptions options_;
};

const RegisterObjective kRegisteredPolicy(
    {.name = "policy",
     .options =
         {{.flag = "--policy-loss",
           .help = "loss of sampled answers by their advantages; ppo is also that of GRPO and DAPO",
           .words = policy_loss_names()},
          {.flag = "--policy-aggregation",
           .help = "how the tokens' losses become one number over the global batch (loss_agg_mode of ROLL and verl)",
           .words = aggregation_names()},
          {.flag = "--policy-sum-norm",
           .least = 0,
           .most = 1e9,
           .help = "length that seq-mean-token-sum-norm divides by; 0: the batch's"},
          {.flag = "--policy-clip-low",
           .initial = 0.2,
           .least = 0,
           .most = 1e3,
           .help = "a token's ratio of probabilities counts from 1 minus this"},
          {.flag = "--policy-clip-high",
           .initial = 0.2,
           .least = 0,
           .most = 1e3,
           .help = "a token's ratio of probabilities counts up to 1 plus this"},
          {.flag = "--policy-dual-clip",
           .least = 0,
           .most = 1e3,
           .help = "most that a ratio counts where the advantage is negative (verl's clip_ratio_c); 0: no bound"},
          {.flag = "--policy-tau", .initial = 0.1, .least = 0, .most = 1e3, .help = "tau of kimi15, and of sapo"},
          {.flag = "--policy-tau-negative",
           .initial = 1.05,
           .least = 0,
           .most = 1e3,
           .help = "tau of sapo where the advantage is not positive"},
          {.flag = "--policy-kl",
           .least = 0,
           .most = 1e3,
           .help = "weight of the divergence from the reference model (kl_loss_coef)"},
          {.flag = "--policy-kl-estimator",
           .initial = 2,
           .help = "estimator of the divergence (kl_penalty)",
           .words = kl_estimator_names()},
          {.flag = "--policy-infer-correction",
           .least = 0,
           .most = 1e3,
           .help = "weighs tokens by exp(old_log_probs - infer_logprobs), up to this; 0: not"},
          {.flag = "--policy-entropy-coefficient",
           .least = 0,
           .most = 1e3,
           .help = "the loss falls by so much of the entropy of the tokens' distributions (entropy_loss_coef)"},
          {.flag = "--policy-cov-share",
           .initial = 2e-4,
           .least = 0,
           .most = 1,
           .help = "share of a micro batch's tokens that clip_cov and kl_cov choose (clip_cov_ratio, kl_cov_ratio)"},
          {.flag = "--policy-cov-low",
           .initial = 1,
           .least = -1e9,
           .most = 1e9,
           .help = "clip_cov chooses tokens whose covariance is above this (clip_cov_lb)"},
          {.flag = "--policy-cov-high",
           .initial = 5,
           .least = -1e9,
           .most = 1e9,
           .help = "clip_cov chooses tokens whose covariance is below this (clip_cov_ub)"},
          {.flag = "--policy-cov-kl",
           .initial = 1,
           .least = 0,
           .most = 1e3,
           .help = "weight of the log ratio of the tokens that kl_cov chooses (ppo_kl_coef)"}},
     .make = [](const std::vector<double>& given) {
       PolicyOptions options;
       options.loss = {.loss = static_cast<PolicyLoss>(given[0]),
                       .clip_low = given[3],
                       .clip_high = given[4],
                       .dual_clip = given[5],
                       .tau = given[6],
                       .tau_negative = given[7],
                       .cov_share = given[12],
                       .cov_low = given[13],
                       .cov_high = given[14],
                       .cov_kl = given[15]};
       options.aggregation = static_cast<Aggregation>(given[1]);
       options.length = given[2];
       options.kl = given[8];
       options.estimator = static_cast<KlEstimator>(given[9]);
       options.most_weight = given[10];
       options.entropy = given[11];
       return std::make_unique<Policy>(options);
     }});

}  // namespace
}  // namespace megashard
