#include "framework/arguments/optimizer_arguments.h"

#include <fnmatch.h>

#include <algorithm>
#include <string>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/argument_value.h"
#include "framework/arguments/option_group.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"

namespace megashard {
namespace {

constexpr const char* kForm = "; give PATTERN:SETTING=NUMBER,..., as in \"*.norm.weight:wd_mult=0,lr_mult=0.1\"";

/// The setting with that name; null if unknown.
std::optional<double>* find_setting(ParamGroupOverride& settings, const std::string& name) {
  if (name == "lr_mult") return &settings.lr_mult;
  if (name == "wd_mult") return &settings.wd_mult;
  if (name == "beta1") return &settings.beta1;
  if (name == "beta2") return &settings.beta2;
  return nullptr;
}

}  // namespace

bool ParamGroupOverride::matches(const std::string& name) const {
  return ::fnmatch(pattern.c_str(), name.c_str(), ignores_case ? FNM_CASEFOLD : 0) == 0;
}

ParamGroupOverride parse_param_group_override(const std::string& text) {
  const std::string which = "--param-group-overrides \"" + text + "\" ";
  const size_t colon = text.rfind(':');
  require(colon != text.npos && colon > 0, which + "names no parameters" + kForm);
  ParamGroupOverride settings{.pattern = text.substr(0, colon)};
  for (const auto& word : split_text(text.substr(colon + 1), ",")) {
    const size_t equals = std::min(word.find('='), word.size());
    auto* setting = find_setting(settings, word.substr(0, equals));
    require(setting != nullptr,
            which + "has the setting \"" + word + "\", and there are lr_mult, wd_mult, beta1 and beta2" + kForm);
    const auto value = parse_number(word.substr(std::min(equals + 1, word.size())));
    const bool is_beta = setting == &settings.beta1 || setting == &settings.beta2;
    require(value && *value >= 0 && (!is_beta || *value < 1),
            which + "has \"" + word + "\", which is no number of 0 or more" + (is_beta ? " below 1" : "") + kForm);
    *setting = value;
  }
  return settings;
}

std::vector<ParamGroupOverride> param_group_overrides(const Arguments& arguments) {
  std::vector<ParamGroupOverride> overrides;
  const auto add_part = [&](const std::string& part) -> ParamGroupOverride& {
    return overrides.emplace_back(ParamGroupOverride{.pattern = "*" + part + "*", .ignores_case = true});
  };
  for (const auto& part : arguments.lr_scale_modules) add_part(part).lr_mult = arguments.lr_mult;
  for (const auto& part : arguments.weight_decay_exclude_modules) add_part(part).wd_mult = 0;
  for (const auto& text : arguments.param_group_overrides) overrides.push_back(parse_param_group_override(text));
  return overrides;
}

}  // namespace megashard

namespace megashard::detail {
namespace {

using A = Arguments;

void add_optimizer(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("optimizer", rows, {.pretrain_only = true});
  OptionGroup saved("optimizer", rows, {.pretrain_only = true, .in_scheduler_state = true});
  group
      .choice("--optimizer", &A::optimizer, kReport, kOptimizerKinds,
              "adam is AdamW; muon updates matrices, and AdamW all other parameters")
      .refuse_values({"dist_muon"}, "muon shards its states and shares its work as they are; use muon");
  group
      .add("--optimizer-selection", &A::optimizer_selection, kFree,
           "MindSpeed-MM's variants of AdamW; all accepted values mean fused AdamW")
      .one_of({"fused_adamw", "fused_torch_adamw"})
      .no_effect("both mean a fused AdamW, which is always used");
  saved.add("--weight-decay", &A::weight_decay, kReport,
            "decoupled, with sgd added to the gradient; biases and 1-D parameters have none");
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
               "factor of a matrix's update: spectral, the root of the larger of rows and columns; shape_scaling, the "
               "root of rows / columns, at least 1; unit_rms_norm, the root of rows / columns");
  group.choice(
      "--muon-fp32-matmul-prec", &A::muon_fp32_matmul_prec, kReport,
      {{"medium", MatmulPrecision::kMedium}, {"high", MatmulPrecision::kHigh}, {"highest", MatmulPrecision::kHighest}},
      "precision of the Newton-Schulz steps on a GPU: highest is fp32, the others allow TF32");
  group.choice("--muon-coefficient-type", &A::muon_coefficient_type, kReport,
               {{"quintic", MuonCoefficients::kQuintic}, {"simple", MuonCoefficients::kSimple}},
               "polynomial of the Newton-Schulz steps");
  group.add("--muon-num-ns-steps", &A::muon_num_ns_steps, kReport, "Newton-Schulz steps").above(0);
  group.add("--muon-extra-scale-factor", &A::muon_extra_scale_factor, kReport, "multiplies each update");
  group.add("--lr-mult", &A::lr_mult, kReport, "multiplies the learning rate of --lr-scale-modules, as MindSpeed-MM")
      .at_least(0);
  group
      .add("--lr-scale-modules", &A::lr_scale_modules, kReport,
           "parts of the names of parameters to which --lr-mult applies")
      .shown_as("NAME");
  group
      .add("--weight-decay-exclude-modules", &A::weight_decay_exclude_modules, kReport,
           "parts of the names of parameters without weight decay (MindSpeed-MM)")
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
               "decay after warm-up from --lr to --min-lr; WSD stays at --lr until its anneal, constant never decays");
  group.choice("--lr-wsd-decay-style", &A::lr_wsd_decay_style, kReport,
               {{"exponential", WsdDecayStyle::kExponential},
                {"linear", WsdDecayStyle::kLinear},
                {"cosine", WsdDecayStyle::kCosine}},
               "shape of WSD's anneal");
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
            "use the schedule of the flags, not of a loaded checkpoint");
  group.add("--use-checkpoint-opt_param-scheduler", &A::use_checkpoint_opt_param_scheduler, kFree,
            "use the schedule of a loaded checkpoint, not of the flags");
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
