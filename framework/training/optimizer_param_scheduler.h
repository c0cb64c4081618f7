#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/arguments.h"

namespace megashard {

/// Learning rate and weight decay as functions of the samples seen. "steps" are samples, as in
/// Megatron.
struct SchedulerOptions {
  double init_lr = 0.0;  ///< at the start of warm-up
  double max_lr = 0.0;
  double min_lr = 0.0;
  double warmup_steps = 0.0;  ///< a fraction of the decay need not be whole
  int64_t decay_steps = 0;
  LrDecayStyle decay_style = LrDecayStyle::kLinear;
  int64_t wsd_decay_steps = 0;  ///< length of the anneal of WSD
  WsdDecayStyle wsd_decay_style = WsdDecayStyle::kExponential;
  double start_weight_decay = 0.0;
  double end_weight_decay = 0.0;
  int64_t weight_decay_steps = 0;
  WeightDecayStyle weight_decay_style = WeightDecayStyle::kConstant;

  enum class OnLoad {
    kMustAgree,      ///< values of the checkpoint and of the options must be equal
    kOptionsDecide,  ///< --override-opt_param-scheduler
    kCheckpointDecides,
  };
  OnLoad on_load = OnLoad::kMustAgree;
};

/// From validated arguments (get_optimizer_param_scheduler).
SchedulerOptions scheduler_options(const Arguments& arguments);

/// megatron.core.optimizer_param_scheduler.OptimizerParamScheduler, without the optimizer: the
/// caller writes the values into its parameter groups. The first step uses the values before any
/// advance().
class OptimizerParamScheduler {
 public:
  /// Throws UsageError when the options contradict each other.
  explicit OptimizerParamScheduler(SchedulerOptions options);

  void advance(int64_t samples) { num_steps_ += samples; }
  int64_t num_steps() const { return num_steps_; }
  double lr() const;
  double weight_decay() const;

  /// Megatron's state_dict: max_lr, lr_warmup_steps, num_steps, ...
  std::vector<std::pair<std::string, ArgumentValue>> state_dict() const;
  /// Sets num_steps and, by on_load, the values; throws UsageErrors naming both values of each
  /// that must agree but does not.
  void load_state_dict(const std::vector<std::pair<std::string, ArgumentValue>>& state);

 private:
  void check() const;

  SchedulerOptions options_;
  int64_t num_steps_ = 0;
};

}  // namespace megashard
