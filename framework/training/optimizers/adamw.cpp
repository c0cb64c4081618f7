#include "parallel/updates/adamw.h"

#include <array>
#include <utility>
#include <vector>

#include "checkpoint/values/state_dict_keys.h"
#include "framework/training/optimizers/rules.h"
#include "parallel/copies/batched_copy.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
namespace {

/// torch.optim.AdamW over all parameters of a group in one launch, which also multiplies the gradients by the factor
/// that clips, casts them, and rounds the fp32 copies into the parameters.
class AdamW final : public UpdateRule {
 public:
  explicit AdamW(const OptimizerOptions& options)
      : eps_(options.eps), dtypes_{options.exp_avg_dtype, options.exp_avg_sq_dtype} {}

  std::vector<std::string> state_names() const override { return {kExpAvgBuffer, "exp_avg_sq"}; }
  at::ScalarType state_dtype(size_t state, at::ScalarType main) const override {
    return main == at::kFloat ? dtypes_[state] : main;
  }
  bool takes_factor() const override { return true; }
  bool counts_steps() const override { return true; }

  void describe(const ParamGroup& group, Dict& entry) const override {
    entry.set("betas", Tuple{{group.beta1, group.beta2}});
    entry.set("eps", eps_);
    entry.set("amsgrad", false);
    entry.set("capturable", false);
    entry.set("decoupled_weight_decay", true);
    set_common_keys(entry);
  }

  void step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
            const StepContext& context) override {
    std::vector<at::Tensor> kept;  // arrays in place of such with gaps, until the kernel is enqueued
    std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps;
    pieces_.clear();
    for (const auto* each : parameters) {
      AdamWPiece& piece = pieces_.emplace_back();
      piece = piece_of(*each, kept);
      if (!each->main.is_contiguous()) {
        with_gaps.emplace_back(unguarded(each->main), kept.emplace_back(unguarded(each->main).contiguous()));
        piece.main = kept.back().mutable_data_ptr();
      }
      if (each->has_copy() && !each->parameter.is_contiguous()) with_gaps.emplace_back(each->parameter, each->main);
    }
    const AdamWNumbers numbers{.lr = group.lr,
                               .beta1 = group.beta1,
                               .beta2 = group.beta2,
                               .eps = eps_,
                               .weight_decay = group.weight_decay,
                               .factor = context.factor ? context.factor->const_data_ptr<double>() : nullptr,
                               .skip = context.skip ? context.skip->const_data_ptr<float>() : nullptr};
    adamw_step(pieces_, numbers, parameters.front()->main.device());
    for (const auto& [to, from] : with_gaps) to.copy_(from);
  }

 private:
  static AdamWPiece piece_of(const SteppedParameter& each, std::vector<at::Tensor>& kept) {
    const at::Tensor& gradient = each.parameter.grad();
    const bool rounds = each.has_copy() && each.parameter.is_contiguous();
    return {.main = each.main.mutable_data_ptr(),
            .gradient = gradient.is_contiguous() ? gradient.const_data_ptr()
                                                 : kept.emplace_back(unguarded(gradient).contiguous()).const_data_ptr(),
            .exp_avg = each.states[0].mutable_data_ptr(),
            .exp_avg_sq = each.states[1].mutable_data_ptr(),
            .step = each.step.const_data_ptr<float>(),
            .rounded = rounds ? each.parameter.mutable_data_ptr() : nullptr,
            .numel = each.main.numel(),
            .first_tile = 0,
            .main_format = float_format_of(each.main.scalar_type()),
            .gradient_format = float_format_of(gradient.scalar_type()),
            .exp_avg_format = float_format_of(each.states[0].scalar_type()),
            .exp_avg_sq_format = float_format_of(each.states[1].scalar_type()),
            .rounded_format = rounds ? float_format_of(each.parameter.scalar_type()) : FloatFormat::kFloat,
            .vectors = false};
  }

  double eps_;
  std::array<at::ScalarType, 2> dtypes_;  // of the moments
  std::vector<AdamWPiece> pieces_;        // of a step; kept for its memory
};

}  // namespace

std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options) { return std::make_unique<AdamW>(options); }

}  // namespace megashard
