#include <limits>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "framework/data/microbatches.h"

namespace megashard::detail {

namespace {

using std::to_string;

void require_positive(const char* flag, const std::optional<int64_t>& value) {
  require(!value || *value > 0,
          std::string(flag) + " is " + to_string(value.value_or(0)) + "; it must be positive.");
}

void require_absent(bool given, const std::string& flag, const std::string& mode) {
  require(!given, flag + " does not go with " + mode +
                      "; count everything in steps (--train-iters) or everything in "
                      "sequences (--train-samples).");
}

void check_length(const Arguments& arguments) {
  require(arguments.train_iters || arguments.train_samples,
          "the length of the training is missing; give --train-iters or --train-samples.");
  require(!arguments.train_iters || !arguments.train_samples,
          "--train-iters and --train-samples exclude each other; give one.");
  require_positive("--train-iters", arguments.train_iters);
  require_positive("--train-samples", arguments.train_samples);
  if (arguments.train_iters) {
    require_absent(arguments.lr_decay_samples.has_value(), "--lr-decay-samples", "--train-iters");
    require_absent(arguments.lr_warmup_samples != 0, "--lr-warmup-samples", "--train-iters");
    require_absent(arguments.lr_wsd_decay_samples.has_value(), "--lr-wsd-decay-samples",
                   "--train-iters");
    require_absent(!arguments.rampup_batch_size.empty(), "--rampup-batch-size", "--train-iters");
  } else {
    require_absent(arguments.lr_decay_iters.has_value(), "--lr-decay-iters", "--train-samples");
    require_absent(arguments.lr_warmup_iters != 0, "--lr-warmup-iters", "--train-samples");
    require_absent(arguments.lr_wsd_decay_iters.has_value(), "--lr-wsd-decay-iters",
                   "--train-samples");
  }
  require(!arguments.lr_warmup_fraction ||
              (arguments.lr_warmup_iters == 0 && arguments.lr_warmup_samples == 0),
          "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples; give one.");
}

void check_batches(Arguments& arguments) {
  require(arguments.micro_batch_size.has_value(),
          "--micro-batch-size is missing; give the sequences of one forward.");
  require_positive("--micro-batch-size", arguments.micro_batch_size);
  require_positive("--global-batch-size", arguments.global_batch_size);
  if (!arguments.global_batch_size) {
    arguments.global_batch_size = *arguments.micro_batch_size * arguments.data_parallel_size;
  }
  const auto options = microbatch_options(arguments);
  // A checkpoint may be beyond its ramp, or beyond the part that these ranks cannot share.
  const bool ramp_may_be_over = arguments.load && !arguments.rampup_batch_size.empty();
  const Microbatches divided(options, ramp_may_be_over ? std::numeric_limits<int64_t>::max() : 0);
  if (arguments.train_samples)
    arguments.train_iters = iterations_for_samples(options, *arguments.train_samples);
  require(*arguments.train_iters > 0,
          "--train-samples " + to_string(arguments.train_samples.value_or(0)) +
              " is less than one global batch of " + to_string(*arguments.global_batch_size) +
              "; there is no step to take.");
}

void check_intervals(const Arguments& arguments) {
  require_positive("--log-interval", arguments.log_interval);
  require_positive("--eval-interval", arguments.eval_interval);
  require_positive("--exit-interval", arguments.exit_interval);
  require_positive("--exit-duration-in-mins", arguments.exit_duration_in_mins);
  require(arguments.eval_iters >= 0, "--eval-iters is " + to_string(arguments.eval_iters) +
                                         "; it must be 0 (no evaluation) or more.");
  require(arguments.empty_unused_memory_level >= 0 && arguments.empty_unused_memory_level <= 2,
          "--empty-unused-memory-level is " + to_string(arguments.empty_unused_memory_level) +
              "; use 0, 1 or 2.");
  require(!arguments.peak_tflops || *arguments.peak_tflops > 0,
          "--peak-tflops is " + argument_text(arguments.peak_tflops.value_or(0)) +
              "; it must be positive.");
}

void check_optimizer(Arguments& arguments) {
  require(arguments.optimizer != "muon",
          "--optimizer muon is not part of this program; use adam or sgd.");
  require(arguments.clip_grad >= 0,
          "--clip-grad is " + argument_text(arguments.clip_grad) + "; use 0 for no clipping.");
  for (const auto& [flag, beta] : {std::pair("--adam-beta1", arguments.adam_beta1),
                                   std::pair("--adam-beta2", arguments.adam_beta2)}) {
    require(beta >= 0 && beta < 1,
            std::string(flag) + " is " + argument_text(beta) + "; it must be from 0 to below 1.");
  }
  auto &start = arguments.start_weight_decay, &end = arguments.end_weight_decay;
  if (arguments.weight_decay_incr_style == "constant") {
    require(!start && !end,
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine; with constant give --weight-decay.");
    start = end = arguments.weight_decay;
  }
  require(start && end, "--weight-decay-incr-style " + arguments.weight_decay_incr_style +
                            " needs --start-weight-decay and --end-weight-decay.");
  require(*start >= 0 && *end >= *start, "the weight decay goes from " + argument_text(*start) +
                                             " to " + argument_text(*end) +
                                             "; it starts at 0 or more and does not decrease.");
}

void check_learning_rate(const Arguments& arguments) {
  require(arguments.lr.has_value() || arguments.skip_train,
          "--lr is missing; give the largest learning rate.");
  const double lr = arguments.lr.value_or(0.0);
  require(lr >= 0, "--lr is " + argument_text(lr) + "; it must not be negative.");
  require(arguments.min_lr >= 0 && (arguments.min_lr <= lr || !arguments.lr),
          "--min-lr " + argument_text(arguments.min_lr) + " is above --lr " + argument_text(lr) +
              " or negative; it is where the decay ends.");
  require(arguments.lr_warmup_init >= 0 && (arguments.lr_warmup_init <= lr || !arguments.lr),
          "--lr-warmup-init " + argument_text(arguments.lr_warmup_init) + " is above --lr " +
              argument_text(lr) + " or negative; it is where the warm-up starts.");
  require(!arguments.lr_warmup_fraction ||
              (*arguments.lr_warmup_fraction >= 0 && *arguments.lr_warmup_fraction < 1),
          "--lr-warmup-fraction is " + argument_text(arguments.lr_warmup_fraction.value_or(0)) +
              "; it must be from 0 to below 1.");
  require(arguments.lr_warmup_iters >= 0 && arguments.lr_warmup_samples >= 0,
          "the warm-up must not be negative.");
  const bool anneals = arguments.lr_wsd_decay_iters || arguments.lr_wsd_decay_samples;
  require(arguments.lr_decay_style != "WSD" || anneals,
          "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples), the length "
          "of its anneal.");
  require_positive("--lr-wsd-decay-iters", arguments.lr_wsd_decay_iters);
  require_positive("--lr-wsd-decay-samples", arguments.lr_wsd_decay_samples);
  require_positive("--lr-decay-iters", arguments.lr_decay_iters);
  require_positive("--lr-decay-samples", arguments.lr_decay_samples);
  require(!arguments.override_opt_param_scheduler || !arguments.use_checkpoint_opt_param_scheduler,
          "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
          "other: either the "
          "flags or the checkpoint decide.");
}

}  // namespace

void validate_schedule(Arguments& arguments) {
  check_length(arguments);
  check_batches(arguments);
  check_intervals(arguments);
  check_optimizer(arguments);
  check_learning_rate(arguments);
}

}  // namespace megashard::detail
