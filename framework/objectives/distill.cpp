#include <ATen/TensorOperators.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/sort.h>

#include <tuple>

#include "framework/objectives/aggregation.h"

namespace megashard {
namespace {

/// Column [K, B, T] float32: the teacher's log-probabilities of its likeliest tokens, kTeacherTokens. -inf: no token.
constexpr const char* kTeacherLogProbs = "teacher_topk_log_probs";

enum class Divergence { kForward, kReverse, kAdaptive, kSkewedForward, kSkewedReverse, kJensenShannon };
const std::vector<std::string> kDivergences{"forward_kl",        "reverse_kl",        "adaptive_kl",
                                            "skewed_forward_kl", "skewed_reverse_kl", "js_divergence"};

struct DistillOptions {
  double weight;  // multiplies the divergence; 1 - weight multiplies the labels' losses
  Divergence divergence;
  double temperature, teacher_temperature;
  double alpha;  // adaptive_kl: the share of the teacher's probability in the tail
  double skew;   // skewed divergences: the share of the other distribution
};

/// Distributions over the teacher's K likeliest tokens: [K, B, T] each.
struct Distribution {
  at::Tensor log_p, p;
};

Distribution distribution_of(const at::Tensor& log_probs, double temperature) {
  const at::Tensor log_p = at::log_softmax(log_probs / temperature, 0);
  return {log_p, log_p.exp()};
}

/// Learning a teacher's probabilities beside the labels (ROLL's distillation pipeline): both distributions are
/// normalised over the teacher's likeliest tokens; divergences are summed over these and averaged over the tokens of
/// the global batch.
class Distill final : public Objective {
 public:
  explicit Distill(const DistillOptions& options) : options_(options) {}

  std::vector<std::string> columns() const override { return {kLossMask, kTeacherTokens, kTeacherLogProbs}; }
  Needs needs() const override { return {.asked = {.teacher_log_probs = true}}; }
  bool is_over_global_batch() const override { return true; }
  at::Tensor count(const Batch& whole) const override { return whole.at(kLossMask).sum(); }

  Loss operator()(const LossInputs& in) const override {
    const at::Tensor& mask = in.batch.at(kLossMask);
    const at::Tensor& given = in.batch.at(kTeacherLogProbs);
    const at::Tensor is_absent = given.isinf();
    Distribution teacher = distribution_of(given, options_.temperature * options_.teacher_temperature);
    teacher.log_p = teacher.log_p.masked_fill(is_absent, 0);
    const Distribution student = distribution_of(in.teacher_log_probs, options_.temperature);
    const at::Tensor divergence = of_tokens(student, teacher, is_absent);
    const at::Tensor losses = (1 - options_.weight) * in.token_losses + options_.weight * divergence;
    Loss loss = aggregated_loss("distill loss", Aggregation::kTokenMean, /*length=*/0, losses, in.batch);
    const at::Tensor labels = mask.sum().to(at::kDouble);
    for (const auto& [name, each] : {std::pair{"kd_loss", divergence}, std::pair{"nll_loss", in.token_losses}}) {
      loss.metrics.push_back(
          {.name = name, .sum = each.detach().masked_fill(mask == 0, 0).sum().to(at::kDouble), .count = labels});
    }
    return loss;
  }

 private:
  /// [B, T]. What the teacher has no token for counts 0.
  at::Tensor of_tokens(const Distribution& student, const Distribution& teacher, const at::Tensor& is_absent) const {
    const auto summed = [&](const at::Tensor& each) { return each.masked_fill(is_absent, 0).sum(0); };
    const auto forward = [&] { return summed(teacher.p * (teacher.log_p - student.log_p)); };
    const auto reverse = [&] { return summed(student.p * (student.log_p - teacher.log_p)); };
    switch (options_.divergence) {
      case Divergence::kForward:
        return forward();
      case Divergence::kReverse:
        return reverse();
      case Divergence::kAdaptive: {
        const at::Tensor share = share_of_head(student, teacher);
        return share * forward() + (1 - share) * reverse();
      }
      case Divergence::kSkewedForward: {
        const at::Tensor mixed = options_.skew * teacher.p + (1 - options_.skew) * student.p;
        return summed(teacher.p * (teacher.log_p - mixed.log()));
      }
      case Divergence::kSkewedReverse: {
        const at::Tensor mixed = (1 - options_.skew) * teacher.p + options_.skew * student.p;
        return summed(student.p * (student.log_p - mixed.log()));
      }
      case Divergence::kJensenShannon:
        break;
    }
    constexpr double kTiny = 1e-9;
    const at::Tensor middle = ((student.p + teacher.p) / 2 + kTiny).log();
    const at::Tensor both =
        teacher.p * ((teacher.p + kTiny).log() - middle) + student.p * ((student.p + kTiny).log() - middle);
    return summed(both / 2);
  }

  /// How much of the distance between the distributions is where the teacher's probabilities are large: [B, T], without
  /// gradient.
  at::Tensor share_of_head(const Distribution& student, const Distribution& teacher) const {
    const auto [sorted, order] = at::sort(teacher.p, 0);
    const at::Tensor gap = (sorted - student.p.detach().gather(0, order)).abs();
    const at::Tensor is_tail = at::cumsum(sorted, 0).le(options_.alpha);
    return gap.masked_fill(is_tail, 0).sum(0) / gap.sum(0).clamp_min(1e-12);
  }

  DistillOptions options_;
};

const RegisterObjective kRegisteredDistill(
    {.name = "distill",
     .options = {{.flag = "--distill-weight",
                  .initial = 0.5,
                  .least = 0,
                  .most = 1,
                  .help = "weight of the divergence from the teacher; the labels' is the rest (distill_loss_weight)"},
                 {.flag = "--distill-divergence",
                  .help = "from the teacher's distribution over its likeliest tokens (kd_objective)",
                  .words = kDivergences},
                 {.flag = "--distill-temperature",
                  .initial = 1,
                  .least = 1e-3,
                  .most = 1e3,
                  .help = "divides the logits of both (kd_temperature)"},
                 {.flag = "--distill-teacher-temperature",
                  .initial = 1,
                  .least = 1e-3,
                  .most = 1e3,
                  .help = "divides the teacher's logits once more (teacher_temperature)"},
                 {.flag = "--distill-adaptive-alpha",
                  .initial = 0.5,
                  .least = 0,
                  .most = 1,
                  .help = "share of the teacher's probability in the tail of adaptive_kl (adaptive_kl_alpha)"},
                 {.flag = "--distill-skew",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1,
                  .help = "share of the other distribution in the skewed divergences (skew_lambda)"}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<Distill>(DistillOptions{options[0], static_cast<Divergence>(options[1]), options[2],
                                                       options[3], options[4], options[5]});
     }});

}  // namespace
}  // namespace megashard
