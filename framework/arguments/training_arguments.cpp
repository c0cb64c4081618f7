#include "framework/arguments/training_arguments.h"

#include <algorithm>
#include <limits>
#include <string>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/microbatches.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/option_group.h"
#include "framework/callbacks/callbacks.h"
#include "framework/mistakes.h"
#include "framework/objectives/objectives.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

template <class Kinds>
void add_options_of(const Kinds& kinds, OptionGroup& group, std::map<std::string, double> TrainingArguments::*values,
                    OnResume on_resume) {
  for (const auto& kind : kinds) {
    for (const KindOption& option : kind.options) {
      if (!option.words.empty()) {
        group.word(option.flag, values, option.initial, option.words, on_resume, option.help);
        continue;
      }
      group.number(option.flag, values, option.initial, on_resume, option.help)
          .at_least(option.least)
          .at_most(option.most);
    }
  }
}

constexpr const char* kObjectiveOfRollouts = "prime-rl";  // without --objective

/// --objective, and the flags of its values.
void add_objectives(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("training", rows, {.pretrain_only = true});
  std::vector<std::string> names;
  for (const auto& kind : objectives()) names.push_back(kind.name);
  group.add("--objective", &A::objective, kMustMatch, "the loss (docs/objectives.md)").one_of(names);
  group
      .add("--loss-plugin", &A::loss_plugin, kFree,
           "on the command line: libraries that register values of --objective, and their flags")
      .shown_as("FILE");
  add_options_of(objectives(), group, &A::objective_options, kReport);
  group
      .add("--ref-model", &A::ref_model, kReport,
           "Hugging Face directory of the reference model of a preference or policy loss; it is sharded as the trained "
           "one, and on a GPU its shards stay in host memory")
      .shown_as("DIR");
  group.choice("--ref-model-dtype", &A::ref_model_dtype, kReport,
               {{"fp32", HfDtype::kFp32}, {"fp16", HfDtype::kFp16}, {"bf16", HfDtype::kBf16}},
               "dtype in which --ref-model is stored and computed");
  group.add("--loss-by-weights", &A::loss_by_weights, kReport,
            "a forward without gradients gives each token's weight in the loss, a second pass trains by these");
}

/// --callback, and the flags of its values.
void add_callbacks(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("training", rows, {.pretrain_only = true});
  std::string names;
  for (const auto& kind : callbacks()) names += (names.empty() ? "; known: " : ", ") + kind.name;
  group.add("--callback", &A::callback, kFree, "listeners of the training loop (docs/extending.md)" + names)
      .shown_as("NAME");
  group
      .add("--callback-plugin", &A::callback_plugin, kFree,
           "libraries that register callbacks, and their flags on the command line")
      .shown_as("FILE");
  add_options_of(callbacks(), group, &A::callback_options, kFree);
}

void add_loop(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("training", rows, {.pretrain_only = true});
  OptionGroup shared("training", rows);
  shared.add("--micro-batch-size", &A::micro_batch_size, kReport, "sequences of one forward on one rank").above(0);
  group
      .add("--global-batch-size", &A::global_batch_size, kReport,
           "sequences per step; unset: micro batch size * data parallel size")
      .above(0);
  group
      .add("--rampup-batch-size", &A::rampup_batch_size, kReport,
           "start, increment and samples of a growing global batch, with --train-samples")
      .nargs_of(3);
  group.add("--decrease-batch-size-if-needed", &A::decrease_batch_size_if_needed, kReport,
            "shrink the global batch to a multiple of micro batch * data parallel size");
  group.add("--train-iters", &A::train_iters, kReport, "steps of the whole training").above(0);
  group.add("--train-samples", &A::train_samples, kReport, "sequences of the whole training, instead of --train-iters")
      .above(0);
  group.add("--exit-interval", &A::exit_interval, kFree, "save and exit when the step is a multiple of it").above(0);
  group.add("--exit-duration-in-mins", &A::exit_duration_in_mins, kFree, "save and exit after so many minutes")
      .above(0);
  group.add("--exit-signal-handler", &A::exit_signal_handler, kFree, "on --exit-signal save and exit");
  group.choice("--exit-signal", &A::exit_signal, kFree,
               {{"SIGTERM", ExitSignal::kTerm},
                {"SIGINT", ExitSignal::kInt},
                {"SIGUSR1", ExitSignal::kUsr1},
                {"SIGUSR2", ExitSignal::kUsr2}},
               "the signal of --exit-signal-handler");
  group
      .add("--no-check-for-nan-in-loss-and-grad", &A::check_for_nan_in_loss_and_grad, kFree,
           "continue if the loss or a gradient is NaN or Inf")
      .turns_off()
      .named("check_for_nan_in_loss_and_grad");
  group.add("--calculate-per-token-loss", &A::calculate_per_token_loss, kReport,
            "average over all tokens of the global batch, not over microbatches");
  add_objectives(rows);
  group
      .add("--empty-unused-memory-level", &A::empty_unused_memory_level, kFree,
           "return cached GPU memory: 0 never, 1 before, 2 also after the optimizer")
      .at_least(0)
      .at_most(2);
  group
      .add("--deterministic-mode", &A::deterministic_mode, kReport,
           "only deterministic kernels; an operator that has none is an error")
      .alias("--use-deter-comp");
  group.add("--skip-train", &A::skip_train, kFree, "evaluate only");
  group.counted(kConsumedTrainSamples);
  group.counted(kConsumedValidSamples);
  add_callbacks(rows);
}

void add_validation(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("validation", rows, {.pretrain_only = true});
  group.add("--eval-iters", &A::eval_iters, kFree, "global batches of one evaluation; 0: none").at_least(0);
  group.add("--eval-interval", &A::eval_interval, kFree, "steps between evaluations").above(0);
  group.add("--test-mode", &A::test_mode, kFree, "").no_effect("it belongs to Megatron's own tests");
}

void require_absent(Mistakes& rules, bool given, const std::string& flag, const std::string& mode) {
  rules.require(!given, flag + " does not go with " + mode +
                            "; count everything in steps (--train-iters) or everything in "
                            "sequences (--train-samples).");
}

/// An evaluation needs no length, batch size or learning rate; it uses a checkpoint, if any.
void leave_training_out(Arguments& arguments) {
  if (!arguments.skip_train) return;
  if (!arguments.train_iters && !arguments.train_samples) arguments.train_iters = 1;
  if (!arguments.override_opt_param_scheduler) arguments.use_checkpoint_opt_param_scheduler = true;
}

void check_callbacks(const Arguments& arguments, Mistakes& rules) {
  std::vector<std::string> known;
  for (const auto& kind : callbacks()) known.push_back(kind.name);
  for (const std::string& name : arguments.callback) {
    rules.require(std::ranges::find(known, name) != known.end(),
                  "--callback " + name + ": there is no such callback" + did_you_mean(name, known) +
                      "; give the library that registers it by --callback-plugin FILE.");
  }
}

void check_objective(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.loss_by_weights || arguments.objective != kNextToken,
                "--loss-by-weights computes the weights of a loss first, and those of --objective next-token are "
                "known; leave it out.");
  const auto objective = make_objective(arguments.objective, arguments.objective_options);
  rules.require(!arguments.ref_model || std::ranges::count(objective->columns(), kRefLogProbs) > 0,
                "--ref-model " + arguments.ref_model.value_or("") + ": --objective " + arguments.objective +
                    " compares with no reference; leave it out.");
  rules.require(arguments.ref_model || !arguments.is_given("ref_model_dtype"),
                "--ref-model-dtype needs --ref-model, the folder of the reference.");
  const auto needs = objective->needs();
  const bool by_losses = !needs.values && !needs.asked.entropies && !needs.asked.teacher_log_probs;
  rules.require(!arguments.loss_by_weights || by_losses,
                "--loss-by-weights weighs the tokens' losses, and --objective " + arguments.objective +
                    " is a function of more than these; leave it out.");
}

void check_length(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.train_iters || arguments.train_samples,
                "the length of the training is missing; give --train-iters or --train-samples.");
  rules.require(!arguments.train_iters || !arguments.train_samples,
                "--train-iters and --train-samples exclude each other; give one.");
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

void check_batches(Arguments& arguments, const RunParts& parts, Mistakes& rules) {
  if ((arguments.rollouts || parts.serves) && !arguments.micro_batch_size) arguments.micro_batch_size = 1;
  rules.require(arguments.micro_batch_size.has_value(),
                "--micro-batch-size is missing; give the sequences of one forward.");
  if (arguments.micro_batch_size.value_or(0) <= 0 || arguments.global_batch_size.value_or(1) <= 0) return;
  if (!arguments.global_batch_size) {
    arguments.global_batch_size = *arguments.micro_batch_size * arguments.data_parallel_size;
  }
  const auto options = microbatch_options(arguments);
  // A checkpoint may be after the ramp, or after the batch sizes that are not divisible by these ranks.
  const bool ramp_may_be_over = arguments.load && !arguments.rampup_batch_size.empty();
  const bool divisible =
      rules.attempt([&] { Microbatches(options, ramp_may_be_over ? std::numeric_limits<int64_t>::max() : 0); });
  if (!arguments.train_samples || !divisible) return;
  arguments.train_iters = iterations_for_samples(options, *arguments.train_samples);
  rules.require(*arguments.train_iters > 0 || *arguments.train_samples <= 0,
                "--train-samples " + to_string(*arguments.train_samples) + " is less than one global batch of " +
                    to_string(*arguments.global_batch_size) + "; there is no step to take.");
}

}  // namespace

void add_training_options(std::vector<Option>& rows) {
  add_loop(rows);
  add_validation(rows);
}

void validate_training(Arguments& arguments, const RunParts& parts, Mistakes& rules) {
  leave_training_out(arguments);
  if (arguments.rollouts && arguments.objective == kNextToken && !arguments.is_given("objective"))
    arguments.objective = kObjectiveOfRollouts;
  const bool trains = parts.training && !arguments.skip_train;
  if (!trains && !arguments.micro_batch_size) arguments.micro_batch_size = 1;
  check_callbacks(arguments, rules);
  check_objective(arguments, rules);
  if (parts.schedule) check_length(arguments, rules);
  check_batches(arguments, parts, rules);
}

}  // namespace megashard::detail
