#include "framework/training/optimizers/update_rule.h"

#include <ATen/ops/_fused_sgd.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "checkpoint/values/state_dict_keys.h"
#include "parallel/copies/batched_copy.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/guarded_tensor.h"
#include "parallel/updates/adamw.h"

namespace megashard {

/// Runs the kernel on some parameters after the others: at once on gradients that it can take as they are, bucket by
/// bucket on others.
class ElementwiseRule::Buckets {
 public:
  Buckets(const ElementwiseRule& rule, const ParamGroup& group, const StepContext& context)
      : rule_(rule), group_(group), context_(context), states_(rule.state_names().size()) {
    as_they_are_.states.resize(states_);
    bucket_.states.resize(states_);
  }

  void add(const SteppedParameter& each) {
    if (!each.casts_gradient() && each.parameter.grad().is_contiguous()) {
      append(as_they_are_, each, each.parameter.grad(), [](const at::Tensor& tensor) { return tensor; });
      if (each.has_copy()) with_copies_.push_back(&each);
      return;
    }
    const at::Tensor gradient = unguarded(each.parameter.grad());
    const int64_t all = gradient.numel(), limit = context_.cast_elements;
    // A part is a row of the flat tensors; what has gaps is taken whole.
    const bool divides =
        all > limit && gradient.is_contiguous() && each.main.is_contiguous() && each.parameter.is_contiguous();
    if (!divides) return add_cast(each, gradient, [](const at::Tensor& tensor) { return tensor; });
    for (int64_t begin = 0; begin < all; begin += limit) {
      const int64_t count = std::min(limit, all - begin);
      add_cast(each, gradient,
               [=](const at::Tensor& tensor) { return unguarded(tensor).view({-1}).narrow(0, begin, count); });
    }
  }

  void finish() {
    flush();
    if (!as_they_are_.parameters.empty()) run_kernel(as_they_are_);
    for (const auto* each : with_copies_) each->parameter.copy_(each->main);
  }

 private:
  void run_kernel(const KernelLists& lists) const {
    const UnguardedScope rows;
    rule_.run_kernel(lists, group_, context_.skip);
  }

  template <class Part>
  static void append(KernelLists& lists, const SteppedParameter& each, at::Tensor gradient, const Part& part) {
    lists.parameters.push_back(part(each.main));
    lists.gradients.push_back(std::move(gradient));
    for (size_t i = 0; i < each.states.size(); ++i) lists.states[i].push_back(part(each.states[i]));
    if (each.step.defined()) lists.steps.push_back(each.step);
  }

  template <class Part>
  void add_cast(const SteppedParameter& each, const at::Tensor& gradient, const Part& part) {
    const at::Tensor mine = part(gradient);
    if (cast_ > 0 && cast_ + mine.numel() > context_.cast_elements) flush();
    cast_ += mine.numel();
    const bool scaled = each.casts_gradient() && context_.factor;
    const at::Tensor wide = mine.to(each.main.scalar_type(), /*non_blocking=*/false, /*copy=*/scaled).contiguous();
    if (scaled) scaled_.push_back(wide);
    append(bucket_, each, wide, part);
    if (each.has_copy()) rounded_.emplace_back(part(each.parameter), bucket_.parameters.back());
  }

  void flush() {
    if (bucket_.parameters.empty()) return;
    if (!scaled_.empty()) multiply_grads_(scaled_, *context_.factor);
    run_kernel(bucket_);
    for (const auto& [parameter, main] : rounded_) parameter.copy_(main);
    bucket_ = {};
    bucket_.states.resize(states_);
    scaled_.clear();
    rounded_.clear();
    cast_ = 0;
  }

  const ElementwiseRule& rule_;
  const ParamGroup& group_;
  const StepContext& context_;
  size_t states_;
  KernelLists as_they_are_, bucket_;
  std::vector<const SteppedParameter*> with_copies_;        // of as_they_are_
  std::vector<at::Tensor> scaled_;                          // of bucket_: to be multiplied by the factor
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded_;  // of bucket_: parameter, fp32 copy
  int64_t cast_ = 0;                                        // elements of bucket_
};

void ElementwiseRule::step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
                           const StepContext& context) {
  Buckets buckets(*this, group, context);
  for (const auto* each : parameters) buckets.add(*each);
  buckets.finish();
}

namespace {

/// torch.optim.SGD: weight decay joins the gradient; the momentum buffer starts as the first gradient, which is what a
/// buffer of zeros gives.
class Sgd final : public ElementwiseRule {
 public:
  explicit Sgd(double momentum) : momentum_(momentum) {}

  std::vector<std::string> state_names() const override {
    return momentum_ == 0 ? std::vector<std::string>() : std::vector<std::string>{kMomentumBuffer};
  }

  void describe(const ParamGroup& /*group*/, Dict& entry) const override {
    entry.set("momentum", momentum_);
    entry.set("dampening", 0);
    entry.set("nesterov", false);
    set_common_keys(entry);
  }

 protected:
  void run_kernel(const KernelLists& lists, const ParamGroup& group,
                  const std::optional<at::Tensor>& skip) const override {
    at::_fused_sgd_(lists.parameters, lists.gradients, momentum_ == 0 ? at::TensorList() : lists.states[0],
                    group.weight_decay, momentum_, group.lr, /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/false, /*grad_scale=*/{}, /*found_inf=*/skip);
  }

 private:
  double momentum_;
};

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

std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options) {
  return std::make_unique<Sgd>(options.momentum);
}

std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options) { return std::make_unique<AdamW>(options); }

}  // namespace megashard
