#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "framework/objectives/sequences.h"

namespace megashard {

/// Losses of a policy, each a number a token, of log-probabilities now and when the answer was sampled (`old`), and of
/// advantages A. With r = exp(log p - old):
enum class PolicyLoss {
  kPpo,        ///< -min(r A, clip(r) A), with a dual clip where A < 0 (verl "vanilla"; GRPO, DAPO, Dr. GRPO)
  kGspo,       ///< the same with the mean ratio of the sequence (verl "gspo"; ROLL importance_sampling: seq)
  kCispo,      ///< -clip(r) A log p, without a gradient through the clipped ratio
  kReinforce,  ///< -A log p (verl "gpg", ROLL "vanilla")
  kTis,        ///< -clip(r, 0, 1) A log p, without a gradient through the ratio (ROLL "tis")
  kTopr,       ///< reinforce where the sequence's score > 0, else tis (ROLL "topr")
  kKimi15,     ///< -A log p + tau / 2 (log p - old)^2 (ROLL "kimi15", verl "dro")
  kSapo,       ///< -A sigmoid(tau (r - 1)) 4 / tau (verl "sapo")
  kGeoMean,    ///< -(mean A) exp(mean of the clipped log ratio) of the sequence (verl "geo_mean")
  kDppoTv,     ///< -A min(r, c) log p where exp(log p) - exp(old) is within the clip (verl "dppo_tv")
  kDppoKl,     ///< the same with a bound on the KL divergence of the token (verl "dppo_kl")
  kClipCov,    ///< ppo without some tokens whose A and log p vary together (verl "clip_cov")
  kKlCov,      ///< -r A, with |log r| for the tokens whose A and log p vary most together (verl "kl_cov")
};
/// Their names for --policy-loss, in this order.
const std::vector<std::string>& policy_loss_names();

struct PolicyLossOptions {
  PolicyLoss loss = PolicyLoss::kPpo;
  double clip_low = 0.2, clip_high = 0.2;  ///< r is clipped to [1 - low, 1 + high]
  double dual_clip = 0;                    ///< upper bound of r where A < 0; 0: none. Of dppo: of every r
  double tau = 0.1;                        ///< kimi15 uses it; sapo, where A > 0
  double tau_negative = 1.05;              ///< sapo uses it where A <= 0
  double cov_share = 2e-4;                 ///< share of a micro batch's tokens that clip_cov and kl_cov choose
  double cov_low = 1, cov_high = 5;        ///< clip_cov chooses among tokens with such covariances
  double cov_kl = 1;                       ///< weight of |log r| in kl_cov
};

/// Holds this rank's tokens for a loss, [B, T] each.
struct PolicyTokens {
  at::Tensor log_probs, old, advantages;
  at::Tensor mask;    ///< 1: a token of an answer
  at::Tensor scores;  ///< topr uses each sequence's reward: [B, T], or broadcast to it
};

struct PolicyTerms {
  at::Tensor losses;   ///< [B, T]
  at::Tensor clipped;  ///< [B, T] bool without gradient: the clip decided; undefined: the loss has none
};

PolicyTerms policy_terms(const PolicyLossOptions& options, const PolicyTokens& tokens, const Sequences& sequences);

/// Estimators of KL(p || reference) a token (ROLL's and verl's kl_penalty): k1, k2, k3, abs.
enum class KlEstimator { kK1, kK2, kK3, kAbs };
const std::vector<std::string>& kl_estimator_names();
at::Tensor kl_terms(KlEstimator estimator, const at::Tensor& log_probs, const at::Tensor& reference);

}  // namespace megashard
