#include "framework/training/optimizers/elementwise_rule.h"

#include <ATen/ops/_fused_sgd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "checkpoint/values/state_dict_keys.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/guarded_tensor.h"

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

}  // namespace

std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options) {
  return std::make_unique<Sgd>(options.momentum);
}

}  // namespace megashard
