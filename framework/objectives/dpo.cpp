#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/relu.h>

#include "framework/objectives/preferences.h"

namespace megashard {
namespace {

enum class DpoLoss { kSigmoid, kRobust, kHinge, kIpo, kIpoSum, kSigmoidNorm };
const std::vector<std::string> kDpoLosses{"sigmoid", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm"};

struct DpoOptions {
  double beta;
  DpoLoss loss;
  double smoothing, nll;
};

/// Direct preference optimisation (arXiv:2305.18290; the loss types of TRL's DPOTrainer; ipo_sum is ROLL's).
/// ref_log_probs [B, T] are the reference model's log-probabilities of the labels.
class Dpo final : public PreferenceObjective {
 public:
  explicit Dpo(const DpoOptions& options) : PreferenceObjective("dpo", options.nll), options_(options) {}

  std::vector<std::string> columns() const override { return {kLossMask, kLabelCounts, kRefLogProbs}; }

 protected:
  Terms terms(const LossInputs& in, const Sequences& sequences) const override {
    const Pairs ratios = sums(-in.token_losses - in.batch.at(kRefLogProbs), in, sequences);
    const Pairs rewards{ratios.chosen * options_.beta, ratios.rejected * options_.beta};
    return {.losses = losses(ratios, means(ratios, sequences)), .rewards = rewards};
  }

 private:
  /// Takes sums of log ratios over the answers, and their means.
  at::Tensor losses(const Pairs& ratios, const Pairs& means) const {
    const double beta = options_.beta, flipped = options_.smoothing;
    const auto smoothed = [&](const at::Tensor& x, double sign) {
      const at::Tensor clean = -at::log_sigmoid(x);
      return flipped == 0 ? clean : (1 - flipped) * clean - sign * flipped * at::log_sigmoid(-x);
    };
    switch (options_.loss) {
      case DpoLoss::kSigmoid:
        return smoothed(beta * ratios.difference(), 1);
      case DpoLoss::kRobust:
        return smoothed(beta * ratios.difference(), -1) / (1 - 2 * flipped);
      case DpoLoss::kHinge:
        return at::relu(1 - beta * ratios.difference());
      case DpoLoss::kIpo:
        return (means.difference() - 1 / (2 * beta)).square();
      case DpoLoss::kIpoSum:
        return (ratios.difference() - 1 / (2 * beta)).square();
      case DpoLoss::kSigmoidNorm:
        break;
    }
    return smoothed(beta * means.difference(), 1);
  }

  DpoOptions options_;
};

const RegisterObjective kRegisteredDpo(
    {.name = "dpo",
     .options = {{.flag = "--dpo-beta",
                  .initial = 0.1,
                  .least = 0,
                  .most = 1e3,
                  .help = "how strongly --objective dpo keeps the model near the reference (TRL's beta)"},
                 {.flag = "--dpo-loss-type",
                  .help = "loss of a pair (TRL's loss_type); ipo_sum: by sums of log-probabilities",
                  .words = kDpoLosses},
                 {.flag = "--dpo-label-smoothing",
                  .least = 0,
                  .most = 0.49,
                  .help =
                      "probability that a pair's answers are the wrong way round; of sigmoid, robust, sigmoid_norm"},
                 {.flag = "--dpo-nll-weight",
                  .least = 0,
                  .most = 1e3,
                  .help = "adds so much of the chosen answers' mean token loss (TRL's loss_type sft)"}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<Dpo>(DpoOptions{options[0], static_cast<DpoLoss>(options[1]), options[2], options[3]});
     }});

}  // namespace
}  // namespace megashard
