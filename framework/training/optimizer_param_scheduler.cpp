#include "framework/training/optimizer_param_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "framework/mistakes.h"

namespace megashard {

namespace {

using State = std::vector<std::pair<std::string, ArgumentValue>>;

double cosine_from_one(double ratio) { return 0.5 * (std::cos(std::numbers::pi * ratio) + 1.0); }

double wsd_coefficient(const SchedulerOptions& options, double num_steps) {
  const auto anneal = static_cast<double>(options.wsd_decay_steps);
  const double start = static_cast<double>(options.decay_steps) - anneal;
  if (num_steps <= start) return 1.0;
  const double ratio = (num_steps - start) / anneal;
  switch (options.wsd_decay_style) {
    case WsdDecayStyle::kLinear:
      return 1.0 - ratio;
    case WsdDecayStyle::kCosine:
      return cosine_from_one(ratio);
    case WsdDecayStyle::kExponential:
      break;
  }
  return 2.0 * std::pow(0.5, ratio) - 1.0;
}

/// The names of styles in a checkpoint are those of these flags.
template <class T>
constexpr const char* kFlagOf = nullptr;
template <>
constexpr const char* kFlagOf<LrDecayStyle> = "lr_decay_style";
template <>
constexpr const char* kFlagOf<WeightDecayStyle> = "weight_decay_incr_style";

template <class T>
ArgumentValue to_state(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return choice_name(kFlagOf<T>, value);
  } else {
    return value;
  }
}

/// The value of one key; unset when the state has no such key. Throws UsageError for one of another type, and for a
/// style that nobody knows.
template <class T>
std::optional<T> find_value(const State& state, const std::string& key) {
  for (const auto& [name, value] : state) {
    if (name != key) continue;
    if constexpr (std::is_enum_v<T>) {
      if (const auto* text = std::get_if<std::string>(&value)) return static_cast<T>(choice_value(kFlagOf<T>, *text));
    } else if (const auto same = value_as<T>(value)) {
      return same;
    }
    throw UsageError("the checkpoint's scheduler has " + key + " = " + argument_text(value) +
                     ", which is of another type; load with --override-opt_param-scheduler.");
  }
  return std::nullopt;
}

}  // namespace

SchedulerOptions scheduler_options(const Arguments& arguments) {
  SchedulerOptions options{.init_lr = arguments.lr_warmup_init,
                           .max_lr = arguments.lr.value_or(0.0),
                           .min_lr = arguments.min_lr,
                           .decay_style = arguments.lr_decay_style,
                           .wsd_decay_style = arguments.lr_wsd_decay_style,
                           .start_weight_decay = arguments.start_weight_decay.value_or(arguments.weight_decay),
                           .end_weight_decay = arguments.end_weight_decay.value_or(arguments.weight_decay),
                           .weight_decay_style = arguments.weight_decay_incr_style};
  if (arguments.train_samples) {
    options.decay_steps = arguments.lr_decay_samples.value_or(*arguments.train_samples);
    options.weight_decay_steps = *arguments.train_samples;
    options.wsd_decay_steps = arguments.lr_wsd_decay_samples.value_or(0);
    options.warmup_steps = static_cast<double>(arguments.lr_warmup_samples);
  } else {
    const int64_t batch = arguments.global_batch_size.value_or(1), iterations = arguments.train_iters.value_or(0);
    options.decay_steps = arguments.lr_decay_iters.value_or(iterations) * batch;
    options.weight_decay_steps = iterations * batch;
    options.wsd_decay_steps = arguments.lr_wsd_decay_iters.value_or(0) * batch;
    options.warmup_steps = static_cast<double>(arguments.lr_warmup_iters * batch);
  }
  if (arguments.lr_warmup_fraction) {
    options.warmup_steps = *arguments.lr_warmup_fraction * static_cast<double>(options.decay_steps);
  }
  if (arguments.override_opt_param_scheduler) options.on_load = SchedulerOptions::OnLoad::kOptionsDecide;
  if (arguments.use_checkpoint_opt_param_scheduler) {
    options.on_load = SchedulerOptions::OnLoad::kCheckpointDecides;
  }
  return options;
}

OptimizerParamScheduler::OptimizerParamScheduler(SchedulerOptions options) : options_(std::move(options)) { check(); }

void OptimizerParamScheduler::check() const {
  if (options_.decay_steps <= 0) {
    throw UsageError("the learning rate decays over " + std::to_string(options_.decay_steps) +
                     " samples; it needs --train-iters, --lr-decay-iters or their sample forms to be positive.");
  }
  if (options_.warmup_steps >= static_cast<double>(options_.decay_steps)) {
    throw UsageError("the warm-up lasts " + argument_text(options_.warmup_steps) + " samples, but the decay ends at " +
                     std::to_string(options_.decay_steps) +
                     "; shorten --lr-warmup-iters or lengthen --lr-decay-iters (or their sample forms).");
  }
  if (options_.decay_style == LrDecayStyle::kWsd &&
      (options_.wsd_decay_steps <= 0 || options_.wsd_decay_steps > options_.decay_steps)) {
    throw UsageError("the anneal of WSD lasts " + std::to_string(options_.wsd_decay_steps) + " samples of a decay of " +
                     std::to_string(options_.decay_steps) + "; change --lr-wsd-decay-iters or --lr-decay-iters.");
  }
}

double OptimizerParamScheduler::lr() const {
  const auto steps = static_cast<double>(num_steps_);
  const double warmup = options_.warmup_steps, decay = static_cast<double>(options_.decay_steps);
  if (warmup > 0 && steps <= warmup) {
    return options_.init_lr + (options_.max_lr - options_.init_lr) * steps / warmup;
  }
  if (options_.decay_style == LrDecayStyle::kConstant) return options_.max_lr;
  if (steps > decay) return options_.min_lr;
  const double ratio = (steps - warmup) / (decay - warmup);
  const auto annealed = [this](double coefficient) {  // between min_lr (0) and max_lr (1)
    return options_.min_lr + coefficient * (options_.max_lr - options_.min_lr);
  };
  switch (options_.decay_style) {
    case LrDecayStyle::kConstant:
      break;
    case LrDecayStyle::kLinear:
      return annealed(1.0 - ratio);
    case LrDecayStyle::kCosine:
      return annealed(cosine_from_one(ratio));
    case LrDecayStyle::kInverseSquareRoot:
      return std::max(options_.min_lr,
                      options_.max_lr * std::sqrt(std::max(warmup, 1.0)) / std::sqrt(std::max(steps, 1.0)));
    case LrDecayStyle::kWsd:
      return annealed(wsd_coefficient(options_, steps));
  }
  return options_.max_lr;
}

double OptimizerParamScheduler::weight_decay() const {
  const double start = options_.start_weight_decay, end = options_.end_weight_decay;
  if (num_steps_ > options_.weight_decay_steps) return end;
  const double ratio = static_cast<double>(num_steps_) / static_cast<double>(options_.weight_decay_steps);
  switch (options_.weight_decay_style) {
    case WeightDecayStyle::kLinear:
      return start + ratio * (end - start);
    case WeightDecayStyle::kCosine:
      return start + cosine_from_one(1.0 - ratio) * (end - start);
    case WeightDecayStyle::kConstant:
      break;
  }
  return end;
}

State OptimizerParamScheduler::state_dict() const {
  const double warmup = options_.warmup_steps;
  const bool whole = warmup == std::floor(warmup);  // Python keeps the int of iterations * batch
  return {{"max_lr", options_.max_lr},
          {"lr_warmup_steps", whole ? ArgumentValue(static_cast<int64_t>(warmup)) : ArgumentValue(warmup)},
          {"num_steps", num_steps_},
          {"lr_decay_style", to_state(options_.decay_style)},
          {"lr_decay_steps", options_.decay_steps},
          {"min_lr", options_.min_lr},
          {"start_wd", options_.start_weight_decay},
          {"end_wd", options_.end_weight_decay},
          {"wd_incr_style", to_state(options_.weight_decay_style)},
          {"wd_incr_steps", options_.weight_decay_steps}};
}

void OptimizerParamScheduler::load_state_dict(const State& state) {
  Mistakes mistakes;
  const auto merge = [&](auto& ours, const char* key) {
    if (options_.on_load == SchedulerOptions::OnLoad::kOptionsDecide) return;
    const auto theirs = find_value<std::decay_t<decltype(ours)>>(state, key);
    if (!theirs) return;
    mistakes.require(options_.on_load != SchedulerOptions::OnLoad::kMustAgree || *theirs == ours,
                     std::string("the scheduler's ") + key + " is " + argument_text(to_state(ours)) +
                         " by the flags, but " + argument_text(to_state(*theirs)) +
                         " in the checkpoint; give the same flags, or choose one by --override-opt_param-scheduler or "
                         "--use-checkpoint-opt_param-scheduler.");
    ours = *theirs;
  };
  merge(options_.max_lr, "max_lr");
  merge(options_.min_lr, "min_lr");
  merge(options_.warmup_steps, "lr_warmup_steps");
  merge(options_.decay_steps, "lr_decay_steps");
  merge(options_.decay_style, "lr_decay_style");
  merge(options_.start_weight_decay, "start_wd");
  merge(options_.end_weight_decay, "end_wd");
  merge(options_.weight_decay_style, "wd_incr_style");
  merge(options_.weight_decay_steps, "wd_incr_steps");
  mistakes.throw_if_any();
  num_steps_ = find_value<int64_t>(state, "num_steps").value_or(0);
  check();
}

}  // namespace megashard
