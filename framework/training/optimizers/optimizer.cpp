#include "framework/training/optimizers/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <unordered_set>

#include "checkpoint/values/state_dict_keys.h"
#include "parallel/copies/batched_copy.h"
#include "parallel/device/device_plan.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"
#include "parallel/updates/adamw.h"

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
  std::array<at::ScalarType, 2> dtypes_;  // dtypes of the two moments
  std::vector<AdamWPiece> pieces_;        // reused by each step
};

}  // namespace

std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options) { return std::make_unique<AdamW>(options); }

namespace {

constexpr size_t kMatrixRule = 0, kOtherRule = 1;

std::vector<std::unique_ptr<UpdateRule>> rules_of(const OptimizerOptions& options) {
  std::vector<std::unique_ptr<UpdateRule>> rules;
  switch (options.kind) {
    case OptimizerKind::kAdam:
      rules.push_back(make_adamw(options));
      break;
    case OptimizerKind::kSgd:
      rules.push_back(make_sgd(options));
      break;
    case OptimizerKind::kMuon:
      rules.push_back(make_muon(options));
      rules.push_back(make_adamw(options));
      break;
  }
  return rules;
}

/// Megatron's choice for `--optimizer muon`: matrices, and stacks of matrices, that are neither embeddings nor output
/// layers.
size_t rule_of(const std::string& name, const at::Tensor& parameter, const OptimizerOptions& options) {
  if (options.kind != OptimizerKind::kMuon) return 0;
  const auto& is_other = options.muon.is_embedding_or_output_parameter;
  const auto& is_stack = options.muon.is_stack_of_matrices;
  const bool has_matrices = parameter.dim() == 2 || (parameter.dim() > 2 && is_stack && is_stack(name));
  return !has_matrices || (is_other && is_other(name)) ? kOtherRule : kMatrixRule;
}

/// The settings of a parameter; biases and 1-D parameters have no weight decay (Megatron's rule), unless an override
/// says otherwise.
ParamGroup settings_of(const std::string& name, const at::Tensor& parameter, const OptimizerOptions& options) {
  const bool is_plain = name == "bias" || name.ends_with(".bias") || parameter.dim() <= 1;
  ParamGroup group{.wd_mult = is_plain ? 0.0 : 1.0, .beta1 = options.beta1, .beta2 = options.beta2};
  const auto set = [](double& value, const std::optional<double>& wanted) { value = wanted.value_or(value); };
  for (const auto& each : options.overrides) {
    if (!each.matches(name)) continue;
    set(group.lr_mult, each.lr_mult);
    set(group.wd_mult, each.wd_mult);
    set(group.beta1, each.beta1);
    set(group.beta2, each.beta2);
  }
  group.lr = options.lr * group.lr_mult;
  group.weight_decay = options.weight_decay * group.wd_mult;
  group.rule = rule_of(name, parameter, options);
  return group;
}

bool same_settings(const ParamGroup& a, const ParamGroup& b) {
  return a.rule == b.rule && a.lr_mult == b.lr_mult && a.wd_mult == b.wd_mult && a.beta1 == b.beta1 &&
         a.beta2 == b.beta2;
}

/// Adds 1, or nothing where `skip` is 1.
void count_step(const std::vector<at::Tensor>& counts, const at::Tensor& skip) {
  if (counts.empty()) return;
  if (counts.front().is_cpu()) {
    const float one = skip.defined() ? 1 - *skip.const_data_ptr<float>() : 1;
    for (const auto& count : counts) *count.mutable_data_ptr<float>() += one;
  } else if (skip.defined()) {
    at::_foreach_add_(counts, 1 - skip);
  } else {
    at::_foreach_add_(counts, 1);
  }
}

/// A plan leaves the host's memory untouched.
at::Tensor zeros_of_state(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const bool touches = !(device_is_planned() && options.device().is_cpu());
  return touches ? at::zeros(sizes, options) : at::empty(sizes, options);
}

}  // namespace

at::Tensor main_gradient(const SteppedParameter& each, const StepContext& context) {
  const at::Tensor gradient = unguarded(each.parameter.grad());
  const bool scaled = each.casts_gradient() && context.factor;
  at::Tensor wide = gradient.to(each.main.scalar_type(), /*non_blocking=*/false, /*copy=*/scaled);
  if (scaled) multiply_grads_({wide}, *context.factor);
  return wide;
}

Optimizer::Optimizer(const NamedTensors& named_parameters, const OptimizerOptions& options)
    : rules_(rules_of(options)), cast_elements_(options.cast_elements) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<ParamGroup> settings;
  for (const auto& [name, parameter] : named_parameters) {
    if (!parameter.requires_grad()) continue;
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    TORCH_CHECK(!parameter.is_meta(), "parameter '", name,
                "' has no storage yet: make the optimizer after the model's weights are there");
    settings.push_back(settings_of(name, parameter, options));
    const auto is_same = [&](const ParamGroup& group) { return same_settings(group, settings.back()); };
    if (std::ranges::none_of(param_groups_, is_same)) param_groups_.push_back(settings.back());
    const bool copied = parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
    SteppedParameter each{.name = name, .parameter = parameter};
    each.main = copied ? parameter.detach().to(at::kFloat) : parameter;
    const auto& rule = *rules_[settings.back().rule];
    const auto state = each.main.options().requires_grad(false);
    for (size_t i = 0; i < rule.state_names().size(); ++i)
      each.states.push_back(
          zeros_of_state(each.main.sizes(), state.dtype(rule.state_dtype(i, each.main.scalar_type()))));
    if (rule.counts_steps()) each.step = at::zeros({}, state.dtype(at::kFloat));
    stepped_.push_back(std::move(each));
    parameters_.push_back(parameter);
  }
  std::ranges::stable_sort(param_groups_, std::ranges::greater(), &ParamGroup::wd_mult);
  for (size_t i = 0; i < stepped_.size(); ++i) {
    const auto group =
        std::ranges::find_if(param_groups_, [&](const ParamGroup& each) { return same_settings(each, settings[i]); });
    stepped_[i].group = static_cast<size_t>(group - param_groups_.begin());
    group->params.push_back(stepped_[i].name);
  }
}

void Optimizer::zero_grad() {
  for (auto& each : stepped_) each.parameter.mutable_grad().reset();
  factor_.reset();
}

void Optimizer::set_lr(double lr) {
  for (auto& group : param_groups_) group.lr = lr * group.lr_mult;
}

void Optimizer::set_weight_decay(double weight_decay) {
  for (auto& group : param_groups_) group.weight_decay = weight_decay * group.wd_mult;
}

Dict Optimizer::describe(const ParamGroup& group) const {
  List names;
  for (const auto& name : group.params) names.items.emplace_back(name);
  Dict entry;
  entry.set(kParamsKey, std::move(names));
  entry.set("lr", group.lr);
  entry.set("weight_decay", group.weight_decay);
  entry.set("wd_mult", group.wd_mult);  // by this and the next three Megatron finds its group
  entry.set("lr_mult", group.lr_mult);
  entry.set("is_expert_parallel", false);
  entry.set("is_decoupled_lr", false);
  rules_[group.rule]->describe(group, entry);
  return entry;
}

at::Tensor Optimizer::clip_grad_norm(double max_norm, const at::Tensor& loss_scale) {
  const at::NoGradGuard no_grad;
  at::Tensor norm = total_grad_norm(parameters_, 2.0), unscale;
  if (loss_scale.defined()) {
    unscale = loss_scale.to(norm.device(), at::kDouble).reciprocal();
    norm = (norm * unscale).to(at::kFloat);
  }
  factor_.reset();
  if (max_norm != 0) factor_ = clip_factor(max_norm, norm);
  if (unscale.defined()) factor_ = factor_ ? *factor_ * unscale : unscale;
  if (!factor_) return norm;
  std::vector<at::Tensor> gradients;
  for (const auto& each : stepped_) {
    const at::Tensor& gradient = each.parameter.grad();
    const bool in_step = rules_[param_groups_[each.group].rule]->takes_factor();
    if (gradient.defined() && !in_step && !each.casts_gradient()) gradients.push_back(gradient);
  }
  multiply_grads_(gradients, *factor_);
  return norm;
}

void Optimizer::step(const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<const SteppedParameter*>> of_group(param_groups_.size());
  for (size_t i = 0; i < of_group.size(); ++i) of_group[i].reserve(param_groups_[i].params.size());
  std::vector<at::Tensor> counts;
  counts.reserve(stepped_.size());
  for (const auto& each : stepped_) {
    if (!each.parameter.grad().defined()) continue;
    check_sizes(each);
    of_group[each.group].push_back(&each);
    if (each.step.defined()) counts.push_back(each.step);
  }
  count_step(counts, skip);
  const StepContext context{
      .skip = skip.defined() ? std::optional(skip) : std::nullopt, .factor = factor_, .cast_elements = cast_elements_};
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    if (!of_group[i].empty()) rules_[param_groups_[i].rule]->step(of_group[i], param_groups_[i], context);
    // Neither the fused kernels nor parts of a parameter tell autograd.
    for (const auto* each : of_group[i]) each->parameter.unsafeGetTensorImpl()->bump_version();
  }
  factor_.reset();
}

void Optimizer::check_sizes(const SteppedParameter& each) {
  const auto& sized = each.states.empty() ? each.main : each.states.front();
  TORCH_CHECK(sized.sizes() == each.parameter.sizes(), "parameter '", each.name, "' has local sizes ",
              each.parameter.sizes(), ", its optimizer state ", sized.sizes(),
              ": make the optimizer after fully_shard, and step it outside forward and backward");
}

ShardedTensors Optimizer::sharded_state_dict() {
  ShardedTensors state;
  for (const auto& each : stepped_) {
    ShardedTensor piece = reshard_and_view(each.parameter);
    const auto add = [&](const std::string& key, const at::Tensor& tensor) {
      piece.local = tensor;
      state.emplace_back(optimizer_state_key(each.name, key), piece);
    };
    const auto names = rules_[param_groups_[each.group].rule]->state_names();
    for (size_t i = 0; i < names.size(); ++i) add(names[i], each.states[i]);
    if (each.step.defined())
      state.emplace_back(optimizer_state_key(each.name, kStepBuffer), ShardedTensor::replicated(each.step));
    if (each.has_copy()) add(kFp32Buffer, each.main);
  }
  return state;
}

void Optimizer::reload_model_parameters(const std::function<bool(const std::string& name)>& is_stale) {
  const at::NoGradGuard no_grad;
  for (const auto& each : stepped_) {
    if (each.has_copy() && is_stale(each.name)) each.main.copy_(each.parameter);
  }
}

}  // namespace megashard
