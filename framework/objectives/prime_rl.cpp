#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "framework/objectives/objectives.h"

namespace megashard {
namespace {

enum class PrimeLoss { kDefault, kIpo };

struct PrimeOptions {
  PrimeLoss loss;
  double mask_low, mask_high;  // bounds of kDefault
  double ipo_threshold;
  double adv_tau, kl_tau;
};

/// Bound and weight in the divergence from the reference; prime-rl has no settings for them.
constexpr double kRefKlMaskLow = 0.2, kRefKlTau = 1e-3;

/// The losses of prime-rl's trainer (trainer/rl/loss.py, 0.8.0) for columns of PrimeRollouts. It is the sum of three,
/// each a mean over its own tokens of the global batch: the policy's by advantages, cross-entropy where ce_weights is
/// not 0, and the divergence from a reference where ref_kl_weights is not 0. The policy that sampled is the inference
/// engine's: r = exp(log p - infer_logprobs).
class PrimeRl final : public Objective {
 public:
  explicit PrimeRl(const PrimeOptions& options) : options_(options) {}

  std::vector<std::string> columns() const override { return {kLossMask, "advantages", "infer_logprobs"}; }
  bool is_over_global_batch() const override { return true; }
  at::Tensor count(const Batch& whole) const override {
    const Parts parts(whole);
    return at::stack({parts.rl.ne(0).sum(), parts.ce.ne(0).sum(), parts.ref_kl.ne(0).sum()}).to(at::kFloat);
  }

  Loss operator()(const LossInputs& in) const override {
    const Parts parts(in.batch);
    const at::Tensor log_probs = -in.token_losses, now = log_probs.detach();
    const at::Tensor is_sampled = parts.rl.ne(0).logical_or(parts.ref_kl.ne(0));
    // Outside the answers infer_logprobs may hold anything.
    const at::Tensor inferred = at::where(is_sampled, in.batch.at("infer_logprobs"), now);
    const at::Tensor log_ratio = log_probs - inferred, ratio = log_ratio.exp();
    const at::Tensor moved = now.exp() - inferred.exp(), advantages = in.batch.at("advantages");
    const at::Tensor too_high = moved > options_.mask_high, too_low = moved < -options_.mask_low;
    const at::Tensor is_good = advantages > 0;
    const at::Tensor masked =
        options_.loss == PrimeLoss::kIpo ? moved.abs() > options_.ipo_threshold : at::where(is_good, too_high, too_low);
    const at::Tensor gain = (options_.adv_tau * advantages).masked_fill(masked, 0);
    const at::Tensor rl = options_.kl_tau * log_ratio.square() - gain * ratio;

    at::Tensor ref_kl = at::zeros_like(log_ratio);
    if (const at::Tensor reference = in.batch.find(kRefLogProbs); reference.defined()) {
      const at::Tensor nearer = (reference - now).masked_fill(moved < -kRefKlMaskLow, 0);
      ref_kl = kRefKlTau * log_ratio.square() - nearer * ratio;
    }
    const auto sum = [](const at::Tensor& losses, const at::Tensor& weights) {
      return (losses * weights).masked_fill(weights == 0, 0).sum();
    };
    Loss loss{.sum = at::stack({sum(rl, parts.rl), sum(in.token_losses, parts.ce), sum(ref_kl, parts.ref_kl)}),
              .metrics = {{.name = "rl loss", .sum = {}, .count = {}}}};
    const auto mean = [&](const char* name, const at::Tensor& each, const at::Tensor& of) {
      loss.metrics.push_back({.name = name,
                              .sum = each.to(at::kDouble).masked_fill(of.logical_not(), 0).sum(),
                              .count = of.sum().to(at::kDouble)});
    };
    mean("mismatch_kl", (ratio - log_ratio - 1).detach(), is_sampled);
    mean("is_masked", masked, parts.rl.ne(0));
    return loss;
  }

 private:
  /// The weights of the tokens in each loss, [B, T]; 0: the loss is without them.
  struct Parts {
    at::Tensor rl, ce, ref_kl;

    explicit Parts(const Batch& batch) {
      const at::Tensor& mask = batch.at(kLossMask);
      const auto weights = [&](const char* name, const at::Tensor& absent) {
        const at::Tensor found = batch.find(name);
        return found.defined() ? found : absent;
      };
      rl = weights("rl_weights", at::ones_like(mask)) * mask;
      ce = weights("ce_weights", at::zeros_like(mask));
      ref_kl = weights("ref_kl_weights", at::zeros_like(mask));
    }
  };

  PrimeOptions options_;
};

const RegisterObjective kRegisteredPrimeRl(
    {.name = "prime-rl",
     .options = {{.flag = "--prime-loss",
                  .help = "prime-rl's trainer.loss.type: default (DPPO's mask by the sign of the advantage) or ipo",
                  .words = {"default", "ipo"}},
                 {.flag = "--prime-dppo-mask-low",
                  .initial = 0.2,
                  .least = 0,
                  .most = 1,
                  .help = "a token whose probability fell by more has no gain, unless its advantage is positive"},
                 {.flag = "--prime-dppo-mask-high",
                  .initial = 0.2,
                  .least = 0,
                  .most = 1,
                  .help = "a token of positive advantage whose probability rose by more has no gain"},
                 {.flag = "--prime-ipo-threshold",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1,
                  .help = "with --prime-loss ipo: a token whose probability moved by more has no gain"},
                 {.flag = "--prime-adv-tau", .initial = 1, .least = 0, .most = 1e3, .help = "factor of advantages"},
                 {.flag = "--prime-kl-tau",
                  .initial = 1e-3,
                  .least = 0,
                  .most = 1e3,
                  .help = "weight of the squared log ratio to the inference engine"}},
     .make = [](const std::vector<double>& given) {
       return std::make_unique<PrimeRl>(PrimeOptions{.loss = static_cast<PrimeLoss>(given[0]),
                                                     .mask_low = given[1],
                                                     .mask_high = given[2],
                                                     .ipo_threshold = given[3],
                                                     .adv_tau = given[4],
                                                     .kl_tau = given[5]});
     }});

}  // namespace
}  // namespace megashard
