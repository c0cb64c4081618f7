#include "framework/arguments/optimizer_arguments.h"

#include <string>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/option_group.h"
#include "framework/arguments/param_group_overrides.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;

void add_optimizer(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("optimizer", rows, {.pretrain_only = true});
  OptionGroup saved("optimizer", rows, {.pretrain_only = true, .in_scheduler_state = true});
  group
      .choice("--optimizer", &A::optimizer, kReport, kOptimizerKinds,
              "adam is AdamW; muon steps matrices, and AdamW what is none")
      .refuse_values({"dist_muon"}, "muon shards its states and shares its work as they are; use muon");
  group
      .add("--optimizer-selection", &A::optimizer_selection, kFree,
           "MindSpeed-MM's choice of AdamW; all that are accepted mean a fused one")
      .one_of({"fused_adamw", "fused_torch_adamw"})
      .no_effect("both mean a fused AdamW, which is always used");
  saved.add("--weight-decay", &A::weight_decay, kReport,
            "decoupled, but with sgd added to the gradient; biases and 1-D parameters have none");
  saved.add("--start-weight-decay", &A::start_weight_decay, kReport, "first value of an increasing weight decay");
  saved.add("--end-weight-decay", &A::end_weight_decay, kReport, "last value of an increasing weight decay");
  saved.choice("--weight-decay-incr-style", &A::weight_decay_incr_style, kReport,
               {{"constant", WeightDecayStyle::kConstant},
                {"linear", WeightDecayStyle::kLinear},
                {"cosine", WeightDecayStyle::kCosine}},
               "how the weight decay increases");
  group.add("--clip-grad", &A::clip_grad, kReport, "largest gradient norm; 0 does not clip").at_least(0);
  group.add("--adam-beta1", &A::adam_beta1, kReport, "decay of the first moment").at_least(0).below(1);
  group.add("--adam-beta2", &A::adam_beta2, kReport, "decay of the second moment").at_least(0).below(1);
  group.add("--adam-eps", &A::adam_eps, kReport, "added to the denominator").above(0);
  group.add("--use-precision-aware-optimizer", &A::use_precision_aware_optimizer, kReport,
            "--exp-avg-dtype and --exp-avg-sq-dtype may be bf16");
  const char* const scaled = "AdamW's moments are kept in fp32 or bf16; give one of these";
  const auto moments = {std::pair{"fp32", MomentDtype::kFp32}, std::pair{"bf16", MomentDtype::kBf16}};
  group.choice("--exp-avg-dtype", &A::exp_avg_dtype, kReport, moments, "how AdamW keeps its first moment")
      .refuse_values({"fp16", "fp8"}, scaled);
  group.choice("--exp-avg-sq-dtype", &A::exp_avg_sq_dtype, kReport, moments, "how AdamW keeps its second moment")
      .refuse_values({"fp16", "fp8"}, scaled);
  group.add("--sgd-momentum", &A::sgd_momentum, kReport, "momentum of --optimizer sgd").at_least(0).below(1);
  group.add("--muon-momentum", &A::muon_momentum, kReport, "momentum of --optimizer muon").at_least(0).below(1);
  group.add("--muon-use-nesterov", &A::muon_use_nesterov, kReport, "Nesterov's momentum");
  group
      .add("--muon-no-split-qkv", &A::muon_split_qkv, kReport, "a fused q, k and v projection is one matrix, not three")
      .turns_off()
      .named("muon_split_qkv");
  group.choice("--muon-scale-mode", &A::muon_scale_mode, kReport,
               {{"spectral", MuonScaleMode::kSpectral},
                {"shape_scaling", MuonScaleMode::kShapeScaling},
                {"unit_rms_norm", MuonScaleMode::kUnitRmsNorm}},
               "a matrix's update is multiplied by: spectral, the root of the larger of rows and columns; "
               "shape_scaling, the root of rows / columns, at least 1; unit_rms_norm, the root of rows / columns");
  group.choice(
      "--muon-fp32-matmul-prec", &A::muon_fp32_matmul_prec, kReport,
      {{"medium", MatmulPrecision::kMedium}, {"high", MatmulPrecision::kHigh}, {"highest", MatmulPrecision::kHighest}},
      "of the Newton-Schulz steps on a GPU: highest is fp32, the others let it use TF32");
  group.choice("--muon-coefficient-type", &A::muon_coefficient_type, kReport,
               {{"quintic", MuonCoefficients::kQuintic}, {"simple", MuonCoefficients::kSimple}},
               "polynomial of the Newton-Schulz steps");
  group.add("--muon-num-ns-steps", &A::muon_num_ns_steps, kReport, "Newton-Schulz steps").above(0);
  group.add("--muon-extra-scale-factor", &A::muon_extra_scale_factor, kReport, "multiplies each update");
  group.add("--lr-mult", &A::lr_mult, kReport, "multiplies the learning rate of --lr-scale-modules, as MindSpeed-MM")
      .at_least(0);
  group
      .add("--lr-scale-modules", &A::lr_scale_modules, kReport,
           "parts of the names of parameters that --lr-mult is for")
      .shown_as("NAME");
  group
      .add("--weight-decay-exclude-modules", &A::weight_decay_exclude_modules, kReport,
           "parts of the names of parameters without weight decay, as MindSpeed-MM")
      .shown_as("NAME");
  group
      .add("--param-group-overrides", &A::param_group_overrides, kReport,
           "PATTERN:SETTING=NUMBER,... for parameters whose names match: lr_mult, wd_mult, beta1, beta2")
      .shown_as("OVERRIDE");
}

void add_learning_rate(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("learning rate", rows, {.pretrain_only = true});
  OptionGroup saved("learning rate", rows, {.pretrain_only = true, .in_scheduler_state = true});
  saved.add("--lr", &A::lr, kReport, "largest learning rate").at_least(0);
  saved.choice("--lr-decay-style", &A::lr_decay_style, kReport, kLrDecayStyles,
               "behind the warm-up, from --lr to --min-lr; WSD stays at --lr until its anneal, constant for good");
  group.choice("--lr-wsd-decay-style", &A::lr_wsd_decay_style, kReport,
               {{"exponential", WsdDecayStyle::kExponential},
                {"linear", WsdDecayStyle::kLinear},
                {"cosine", WsdDecayStyle::kCosine}},
               "form of the anneal of WSD");
  saved.add("--lr-decay-iters", &A::lr_decay_iters, kReport, "steps of the decay; unset: --train-iters").above(0);
  saved.add("--lr-decay-samples", &A::lr_decay_samples, kReport, "sequences of the decay; unset: --train-samples")
      .above(0);
  group.add("--lr-wsd-decay-iters", &A::lr_wsd_decay_iters, kReport, "steps of the anneal of WSD").above(0);
  group.add("--lr-wsd-decay-samples", &A::lr_wsd_decay_samples, kReport, "sequences of the anneal of WSD").above(0);
  saved.add("--lr-warmup-fraction", &A::lr_warmup_fraction, kReport, "part of the decay that is warm-up")
      .at_least(0)
      .below(1);
  saved.add("--lr-warmup-iters", &A::lr_warmup_iters, kReport, "steps of warm-up").at_least(0);
  saved.add("--lr-warmup-samples", &A::lr_warmup_samples, kReport, "sequences of warm-up").at_least(0);
  group.add("--lr-warmup-init", &A::lr_warmup_init, kReport, "learning rate at the start of warm-up").at_least(0);
  saved.add("--min-lr", &A::min_lr, kReport, "smallest learning rate").at_least(0);
  group.add("--override-opt_param-scheduler", &A::override_opt_param_scheduler, kFree,
            "the flags beat the schedule of a loaded checkpoint");
  group.add("--use-checkpoint-opt_param-scheduler", &A::use_checkpoint_opt_param_scheduler, kFree,
            "the schedule of a loaded checkpoint beats the flags");
}

void check_optimizer(Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.lr_mult == 1 || !arguments.lr_scale_modules.empty(),
                "--lr-mult needs --lr-scale-modules, the parts of the model that it is for.");
  for (const auto& text : arguments.param_group_overrides)
    rules.attempt([&] { parse_param_group_override(text); }, {"--param-group-overrides"});
  const bool narrow = arguments.exp_avg_dtype != MomentDtype::kFp32 || arguments.exp_avg_sq_dtype != MomentDtype::kFp32;
  rules.require(!narrow || arguments.use_precision_aware_optimizer,
                "--exp-avg-dtype and --exp-avg-sq-dtype other than fp32 need --use-precision-aware-optimizer.");
  rules.require(!arguments.use_precision_aware_optimizer || arguments.optimizer == OptimizerKind::kAdam,
                "--use-precision-aware-optimizer is for AdamW's moments; give --optimizer adam or leave it out.");
  auto &start = arguments.start_weight_decay, &end = arguments.end_weight_decay;
  if (arguments.weight_decay_incr_style == WeightDecayStyle::kConstant) {
    rules.require(!start && !end,
                  "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                  "cosine; with constant give --weight-decay.");
    start = end = arguments.weight_decay;
  }
  const bool both =
      rules.require(start && end, "--weight-decay-incr-style " +
                                      choice_name("weight_decay_incr_style", arguments.weight_decay_incr_style) +
                                      " needs --start-weight-decay and --end-weight-decay.");
  if (!both) return;
  rules.require(*start >= 0 && *end >= *start, "the weight decay goes from " + argument_text(*start) + " to " +
                                                   argument_text(*end) +
                                                   "; it starts at 0 or more and does not decrease.");
}

void check_learning_rate(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.lr.has_value() || arguments.skip_train, "--lr is missing; give the largest learning rate.");
  const double lr = arguments.lr.value_or(0.0);
  const auto below = [&](const char* flag, double value, const char* what) {
    rules.require(!arguments.lr || value <= lr, flag + (" " + argument_text(value)) + " is above --lr " +
                                                    argument_text(lr) + "; it is where " + what + ".");
  };
  below("--min-lr", arguments.min_lr, "the decay ends");
  below("--lr-warmup-init", arguments.lr_warmup_init, "the warm-up starts");
  const bool anneals = arguments.lr_wsd_decay_iters || arguments.lr_wsd_decay_samples;
  rules.require(arguments.lr_decay_style != LrDecayStyle::kWsd || anneals,
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples), the length "
                "of its anneal.");
  rules.require(!arguments.override_opt_param_scheduler || !arguments.use_checkpoint_opt_param_scheduler,
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
                "other: either the "
                "flags or the checkpoint decide.");
}

}  // namespace

void add_optimizer_options(std::vector<Option>& rows) {
  add_optimizer(rows);
  add_learning_rate(rows);
}

void validate_optimizer(Arguments& arguments, const RunParts& parts, Mistakes& rules) {
  if (parts.training) check_optimizer(arguments, rules);
  if (parts.schedule) check_learning_rate(arguments, rules);
}

}  // namespace megashard::detail
