#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "framework/objectives/aggregation.h"

namespace megashard {
namespace {

/// Columns [B, T] float32, by ROLL's names: what an answer was worth from each token on, and the values that the model
/// gave when the answer was sampled.
constexpr const char* kReturns = "returns";
constexpr const char* kOldValues = "values";

struct CriticOptions {
  Aggregation aggregation;
  double clip;  // 0: values may go anywhere
};

/// A critic of sampled answers (ROLL's CriticWorker, verl's compute_value_loss): half the squared distance of each
/// value from its return, at least that of the value clipped around its old one.
class Critic final : public Objective {
 public:
  explicit Critic(const CriticOptions& options) : options_(options) {}

  std::vector<std::string> columns() const override {
    std::vector<std::string> names{kLossMask, kLabelCounts, kReturns};
    if (options_.clip != 0) names.emplace_back(kOldValues);
    return names;
  }
  Needs needs() const override { return {.values = true}; }
  bool is_over_global_batch() const override { return true; }
  at::Tensor count(const Batch& whole) const override { return aggregation_count(options_.aggregation, whole); }

  Loss operator()(const LossInputs& in) const override {
    const at::Tensor &returns = in.batch.at(kReturns), &mask = in.batch.at(kLossMask);
    const at::Tensor labels = mask.sum().to(at::kDouble);
    const auto mean = [&](const char* name, const at::Tensor& each) {
      return MetricSum{
          .name = name, .sum = each.detach().masked_fill(mask == 0, 0).sum().to(at::kDouble), .count = labels};
    };
    at::Tensor squares = (in.values - returns).square(), is_clipped;
    if (options_.clip != 0) {
      const at::Tensor& old = in.batch.at(kOldValues);
      const at::Tensor near = at::maximum(at::minimum(in.values, old + options_.clip), old - options_.clip);
      const at::Tensor clipped = (near - returns).square();
      is_clipped = (clipped > squares).to(at::kFloat);
      squares = at::maximum(squares, clipped);
    }
    Loss loss = aggregated_loss("value loss", options_.aggregation, /*length=*/0, 0.5 * squares, in.batch);
    loss.metrics.push_back(mean("vpred_mean", in.values));
    if (is_clipped.defined()) loss.metrics.push_back(mean("vf_clipfrac", is_clipped));
    return loss;
  }

 private:
  CriticOptions options_;
};

const RegisterObjective kRegisteredValue(
    {.name = "value",
     .options = {{.flag = "--value-clip",
                  .least = 0,
                  .most = 1e9,
                  .help = "a value counts up to so far from its old one (value_clip); 0: however far"},
                 {.flag = "--value-aggregation",
                  .help = "how the tokens' losses become one number over the global batch (loss_agg_mode of verl)",
                  .words = aggregation_names()}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<Critic>(CriticOptions{static_cast<Aggregation>(options[1]), options[0]});
     }});

}  // namespace
}  // namespace megashard
