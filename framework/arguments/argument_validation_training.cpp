#include <limits>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/param_group_overrides.h"
#include "framework/data/microbatches.h"

namespace megashard::detail {

namespace {

using std::to_string;

bool require_positive(Mistakes& rules, const char* flag, const std::optional<int64_t>& value) {
  return rules.require(!value || *value > 0,
                       std::string(flag) + " is " + to_string(value.value_or(0)) + "; it must be positive.");
}

void require_absent(Mistakes& rules, bool given, const std::string& flag, const std::string& mode) {
  rules.require(!given, flag + " does not go with " + mode +
                            "; count everything in steps (--train-iters) or everything in "
                            "sequences (--train-samples).");
}

/// An evaluation has no length, batch or rate to ask for: it goes on from a checkpoint, if any.
void leave_training_out(Arguments& arguments) {
  if (!arguments.skip_train) return;
  if (!arguments.train_iters && !arguments.train_samples) arguments.train_iters = 1;
  if (!arguments.micro_batch_size) arguments.micro_batch_size = 1;
  if (!arguments.override_opt_param_scheduler) arguments.use_checkpoint_opt_param_scheduler = true;
}

void check_length(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.train_iters || arguments.train_samples,
                "the length of the training is missing; give --train-iters or --train-samples.");
  rules.require(!arguments.train_iters || !arguments.train_samples,
                "--train-iters and --train-samples exclude each other; give one.");
  require_positive(rules, "--train-iters", arguments.train_iters);
  require_positive(rules, "--train-samples", arguments.train_samples);
  if (arguments.train_iters) {
    require_absent(rules, arguments.lr_decay_samples.has_value(), "--lr-decay-samples", "--train-iters");
    require_absent(rules, arguments.lr_warmup_samples != 0, "--lr-warmup-samples", "--train-iters");
    require_absent(rules, arguments.lr_wsd_decay_samples.has_value(), "--lr-wsd-decay-samples", "--train-iters");
    require_absent(rules, !arguments.rampup_batch_size.empty(), "--rampup-batch-size", "--train-iters");
  } else if (arguments.train_samples) {
    require_absent(rules, arguments.lr_decay_iters.has_value(), "--lr-decay-iters", "--train-samples");
    require_absent(rules, arguments.lr_warmup_iters != 0, "--lr-warmup-iters", "--train-samples");
    require_absent(rules, arguments.lr_wsd_decay_iters.has_value(), "--lr-wsd-decay-iters", "--train-samples");
  }
  rules.require(!arguments.lr_warmup_fraction || (arguments.lr_warmup_iters == 0 && arguments.lr_warmup_samples == 0),
                "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples; give one.");
}

void check_batches(Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.micro_batch_size.has_value(),
                "--micro-batch-size is missing; give the sequences of one forward.");
  const bool positive = require_positive(rules, "--micro-batch-size", arguments.micro_batch_size) &&
                        require_positive(rules, "--global-batch-size", arguments.global_batch_size);
  if (!positive || !arguments.micro_batch_size) return;
  if (!arguments.global_batch_size) {
    arguments.global_batch_size = *arguments.micro_batch_size * arguments.data_parallel_size;
  }
  const auto options = microbatch_options(arguments);
  // A checkpoint may be beyond its ramp, or beyond the part that these ranks cannot share.
  const bool ramp_may_be_over = arguments.load && !arguments.rampup_batch_size.empty();
  const bool divisible =
      rules.attempt([&] { Microbatches(options, ramp_may_be_over ? std::numeric_limits<int64_t>::max() : 0); });
  if (!arguments.train_samples || !divisible) return;
  arguments.train_iters = iterations_for_samples(options, *arguments.train_samples);
  rules.require(*arguments.train_iters > 0 || *arguments.train_samples <= 0,
                "--train-samples " + to_string(*arguments.train_samples) + " is less than one global batch of " +
                    to_string(*arguments.global_batch_size) + "; there is no step to take.");
}

void check_intervals(const Arguments& arguments, Mistakes& rules) {
  require_positive(rules, "--log-interval", arguments.log_interval);
  require_positive(rules, "--eval-interval", arguments.eval_interval);
  require_positive(rules, "--exit-interval", arguments.exit_interval);
  require_positive(rules, "--exit-duration-in-mins", arguments.exit_duration_in_mins);
  rules.require(arguments.eval_iters >= 0,
                "--eval-iters is " + to_string(arguments.eval_iters) + "; it must be 0 (no evaluation) or more.");
  rules.require(
      arguments.empty_unused_memory_level >= 0 && arguments.empty_unused_memory_level <= 2,
      "--empty-unused-memory-level is " + to_string(arguments.empty_unused_memory_level) + "; use 0, 1 or 2.");
  rules.require(!arguments.peak_tflops || *arguments.peak_tflops > 0,
                "--peak-tflops is " + argument_text(arguments.peak_tflops.value_or(0)) + "; it must be positive.");
}

void check_optimizer(Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.clip_grad >= 0,
                "--clip-grad is " + argument_text(arguments.clip_grad) + "; use 0 for no clipping.");
  for (const auto& [flag, beta] :
       {std::pair("--adam-beta1", arguments.adam_beta1), std::pair("--adam-beta2", arguments.adam_beta2),
        std::pair("--sgd-momentum", arguments.sgd_momentum), std::pair("--muon-momentum", arguments.muon_momentum)}) {
    rules.require(beta >= 0 && beta < 1,
                  std::string(flag) + " is " + argument_text(beta) + "; it must be from 0 to below 1.");
  }
  rules.require(arguments.muon_num_ns_steps >= 1,
                "--muon-num-ns-steps is " + to_string(arguments.muon_num_ns_steps) + "; it must be positive.");
  rules.require(arguments.lr_mult >= 0,
                "--lr-mult is " + argument_text(arguments.lr_mult) + "; it must not be negative.");
  rules.require(arguments.lr_mult == 1 || !arguments.lr_scale_modules.empty(),
                "--lr-mult needs --lr-scale-modules, the parts of the model that it is for.");
  for (const auto& text : arguments.param_group_overrides)
    rules.attempt([&] { parse_param_group_override(text); }, {"--param-group-overrides"});
  auto &start = arguments.start_weight_decay, &end = arguments.end_weight_decay;
  if (arguments.weight_decay_incr_style == "constant") {
    rules.require(!start && !end,
                  "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                  "cosine; with constant give --weight-decay.");
    start = end = arguments.weight_decay;
  }
  const bool both = rules.require(start && end, "--weight-decay-incr-style " + arguments.weight_decay_incr_style +
                                                    " needs --start-weight-decay and --end-weight-decay.");
  if (!both) return;
  rules.require(*start >= 0 && *end >= *start, "the weight decay goes from " + argument_text(*start) + " to " +
                                                   argument_text(*end) +
                                                   "; it starts at 0 or more and does not decrease.");
}

void check_learning_rate(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.lr.has_value() || arguments.skip_train, "--lr is missing; give the largest learning rate.");
  const double lr = arguments.lr.value_or(0.0);
  const bool rises = rules.require(lr >= 0, "--lr is " + argument_text(lr) + "; it must not be negative.");
  const auto below = [&](const char* flag, double value, const char* what) {
    const bool fits = !arguments.lr || !rises || value <= lr;
    rules.require(value >= 0 && fits, flag + (" " + argument_text(value)) + " is above --lr " + argument_text(lr) +
                                          " or negative; it is where " + what + ".");
  };
  below("--min-lr", arguments.min_lr, "the decay ends");
  below("--lr-warmup-init", arguments.lr_warmup_init, "the warm-up starts");
  rules.require(
      !arguments.lr_warmup_fraction || (*arguments.lr_warmup_fraction >= 0 && *arguments.lr_warmup_fraction < 1),
      "--lr-warmup-fraction is " + argument_text(arguments.lr_warmup_fraction.value_or(0)) +
          "; it must be from 0 to below 1.");
  rules.require(arguments.lr_warmup_iters >= 0 && arguments.lr_warmup_samples >= 0,
                "the warm-up must not be negative.");
  const bool anneals = arguments.lr_wsd_decay_iters || arguments.lr_wsd_decay_samples;
  rules.require(arguments.lr_decay_style != "WSD" || anneals,
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples), the length "
                "of its anneal.");
  require_positive(rules, "--lr-wsd-decay-iters", arguments.lr_wsd_decay_iters);
  require_positive(rules, "--lr-wsd-decay-samples", arguments.lr_wsd_decay_samples);
  require_positive(rules, "--lr-decay-iters", arguments.lr_decay_iters);
  require_positive(rules, "--lr-decay-samples", arguments.lr_decay_samples);
  rules.require(!arguments.override_opt_param_scheduler || !arguments.use_checkpoint_opt_param_scheduler,
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
                "other: either the "
                "flags or the checkpoint decide.");
}

}  // namespace

void validate_schedule(Arguments& arguments, Mistakes& rules) {
  leave_training_out(arguments);
  check_length(arguments, rules);
  check_batches(arguments, rules);
  check_intervals(arguments, rules);
  check_optimizer(arguments, rules);
  check_learning_rate(arguments, rules);
}

}  // namespace megashard::detail
