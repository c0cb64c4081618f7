#include "framework/objectives/policy_losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>

#include <limits>

namespace megashard {
namespace {

constexpr double kMostLogRatio = 20, kMostSequenceLogRatio = 10;  // verl's bounds

/// [sequences] means over the answer's tokens.
at::Tensor means(const at::Tensor& x, const PolicyTokens& tokens, const Sequences& sequences) {
  return sequences.sums(x * tokens.mask) / sequences.label_counts().clamp_min(1);
}

PolicyTerms clipped_ratio(const at::Tensor& ratio, const PolicyLossOptions& options, const at::Tensor& advantages) {
  const at::Tensor plain = -advantages * ratio;
  const at::Tensor clipped = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high);
  at::Tensor losses = at::maximum(plain, clipped);
  at::Tensor is_clipped = clipped > plain;
  if (options.dual_clip > 0) {
    const at::Tensor bound = -advantages * options.dual_clip, is_bad = advantages < 0;
    is_clipped = is_clipped.logical_or((losses > bound).logical_and(is_bad));
    losses = at::where(is_bad, at::minimum(bound, losses), losses);
  }
  return {losses, is_clipped};
}

/// The ratio of a whole sequence, with the gradient of each of its tokens.
at::Tensor sequence_ratio(const at::Tensor& log_ratio, const PolicyTokens& tokens, const Sequences& sequences) {
  const at::Tensor mean = sequences.of_tokens(means(log_ratio.detach(), tokens, sequences));
  const at::Tensor& now = tokens.log_probs;
  return (now - now.detach() + mean).clamp_max(kMostSequenceLogRatio).exp();
}

PolicyTerms geometric_mean(const at::Tensor& log_ratio, const PolicyLossOptions& options, const PolicyTokens& tokens,
                           const Sequences& sequences) {
  const at::Tensor clipped = log_ratio.clamp(-options.clip_low, options.clip_high), sign = tokens.advantages.sign();
  const at::Tensor lesser = sign * at::minimum(sign * log_ratio, sign * clipped);
  const at::Tensor of_sequences = -means(tokens.advantages, tokens, sequences) * means(lesser, tokens, sequences).exp();
  return {sequences.of_tokens(of_sequences) * at::ones_like(log_ratio), log_ratio.detach() != clipped.detach()};
}

/// Trust regions by the token's own probability instead of its ratio.
PolicyTerms by_divergence(const at::Tensor& ratio, const PolicyLossOptions& options, const PolicyTokens& tokens) {
  const at::Tensor now = tokens.log_probs.detach(), p = now.exp(), old = tokens.old.exp();
  at::Tensor may_rise, may_fall;
  if (options.loss == PolicyLoss::kDppoTv) {
    may_rise = p - old <= options.clip_high;
    may_fall = p - old >= -options.clip_low;
  } else {
    constexpr double kTiny = 1e-8;
    const at::Tensor divergence = old * (tokens.old - now) + (1 - old) * at::log((1 - old + kTiny) / (1 - p + kTiny));
    may_rise = (divergence <= options.clip_high).logical_or(p <= old);
    may_fall = (divergence <= options.clip_low).logical_or(p >= old);
  }
  const at::Tensor counts = at::where(tokens.advantages > 0, may_rise, may_fall);
  at::Tensor weight = ratio.detach();
  if (options.dual_clip > 0) weight = weight.clamp_max(options.dual_clip);
  return {-tokens.advantages * weight * tokens.log_probs * counts, counts.logical_not()};
}

/// (A - mean A) (log p - mean log p), of the means over the micro batch's tokens: [B, T] without gradient.
at::Tensor covariances(const PolicyTokens& tokens, const Sequences& sequences) {
  TORCH_CHECK(sequences.ranks() == 1, "--policy-loss clip_cov and kl_cov choose among all tokens of a micro batch: "
                                      "leave out --context-parallel-size");
  const at::Tensor outside = tokens.mask == 0, count = tokens.mask.sum().clamp_min(1);
  const auto centred = [&](const at::Tensor& x) { return x - x.masked_fill(outside, 0).sum() / count; };
  return centred(tokens.advantages) * centred(tokens.log_probs.detach());
}

/// The share of the micro batch's tokens that have the largest `scores`, at least one, and only where `may`.
at::Tensor largest(const at::Tensor& scores, const at::Tensor& may, double share, const at::Tensor& mask) {
  const at::Tensor most = (mask.sum().to(at::kDouble) * share).floor().clamp_min(1);
  const at::Tensor order = scores.masked_fill(may.logical_not(), -std::numeric_limits<double>::infinity()).flatten();
  const at::Tensor places = order.argsort(0, /*descending=*/true).argsort();
  return (places < most).view_as(may).logical_and(may);
}

PolicyTerms without_covariant(const at::Tensor& ratio, const PolicyLossOptions& options, const PolicyTokens& tokens,
                              const Sequences& sequences) {
  PolicyTerms terms = clipped_ratio(ratio, options, tokens.advantages);
  const at::Tensor covariance = covariances(tokens, sequences);
  const at::Tensor may = (covariance > options.cov_low)
                             .logical_and(covariance < options.cov_high)
                             .logical_and(terms.clipped.logical_not())
                             .logical_and(tokens.mask > 0);
  terms.clipped = largest(at::rand_like(covariance), may, options.cov_share, tokens.mask);
  terms.losses = terms.losses.masked_fill(terms.clipped, 0);
  return terms;
}

}  // namespace

const std::vector<std::string>& policy_loss_names() {
  static const std::vector<std::string> names{"ppo",  "gspo",     "cispo",   "reinforce", "tis",      "topr",  "kimi15",
                                              "sapo", "geo_mean", "dppo_tv", "dppo_kl",   "clip_cov", "kl_cov"};
  return names;
}

PolicyTerms policy_terms(const PolicyLossOptions& options, const PolicyTokens& tokens, const Sequences& sequences) {
  const at::Tensor& now = tokens.log_probs;
  const at::Tensor log_ratio = now - tokens.old, ratio = log_ratio.clamp(-kMostLogRatio, kMostLogRatio).exp();
  const at::Tensor reinforce = -tokens.advantages * now;
  const auto truncated = [&] { return reinforce * ratio.detach().clamp(0, 1); };
  switch (options.loss) {
    case PolicyLoss::kPpo:
      return clipped_ratio(ratio, options, tokens.advantages);
    case PolicyLoss::kGspo:
      return clipped_ratio(sequence_ratio(log_ratio, tokens, sequences), options, tokens.advantages);
    case PolicyLoss::kCispo: {
      const at::Tensor fixed = ratio.detach(), clipped = fixed.clamp(1 - options.clip_low, 1 + options.clip_high);
      return {clipped * reinforce, fixed != clipped};
    }
    case PolicyLoss::kReinforce:
      return {reinforce, {}};
    case PolicyLoss::kTis:
      return {truncated(), ratio.detach() > 1};
    case PolicyLoss::kTopr:
      return {at::where(tokens.scores > 0, reinforce, truncated()), {}};
    case PolicyLoss::kKimi15:
      return {reinforce + 0.5 * options.tau * log_ratio.square(), {}};
    case PolicyLoss::kSapo: {
      const auto gate = [&](double tau) { return at::sigmoid(tau * (ratio - 1)) * (4 / tau); };
      return {-tokens.advantages * at::where(tokens.advantages > 0, gate(options.tau), gate(options.tau_negative)), {}};
    }
    case PolicyLoss::kGeoMean:
      return geometric_mean(log_ratio, options, tokens, sequences);
    case PolicyLoss::kClipCov:
      return without_covariant(ratio, options, tokens, sequences);
    case PolicyLoss::kKlCov: {
      const at::Tensor is_chosen =
          largest(covariances(tokens, sequences), tokens.mask > 0, options.cov_share, tokens.mask);
      return {-tokens.advantages * ratio + options.cov_kl * log_ratio.abs() * is_chosen, {}};
    }
    case PolicyLoss::kDppoTv:
    case PolicyLoss::kDppoKl:
      break;
  }
  return by_divergence(ratio, options, tokens);
}

const std::vector<std::string>& kl_estimator_names() {
  static const std::vector<std::string> names{"k1", "k2", "k3", "abs"};
  return names;
}

at::Tensor kl_terms(KlEstimator estimator, const at::Tensor& log_probs, const at::Tensor& reference) {
  const at::Tensor difference = log_probs - reference;
  switch (estimator) {
    case KlEstimator::kK1:
      return difference;
    case KlEstimator::kK2:
      return 0.5 * difference.square();
    case KlEstimator::kK3: {
      const at::Tensor other = (-difference).clamp(-kMostLogRatio, kMostLogRatio);
      return (other.exp() - other - 1).clamp(-10, 10);
    }
    case KlEstimator::kAbs:
      break;
  }
  return difference.abs();
}

}  // namespace megashard
