#include <filesystem>
#include <set>

#include "checkpoint/hugging_face/hf_weights.h"
#include "framework/arguments/argument_table.h"
#include "launch/mindspeed/mindspeed_keys.h"

namespace megashard {
namespace mindspeed_training {  // unique names: files are compiled together
namespace {

namespace fs = std::filesystem;
using V = YamlValue;
using R = MindSpeedRun;
using A = Arguments;

constexpr char kLr[] = "--lr", kMinLr[] = "--min-lr", kWarmupInit[] = "--lr-warmup-init", kDecay[] = "--weight-decay",
               kBeta1[] = "--adam-beta1", kBeta2[] = "--adam-beta2", kEps[] = "--adam-eps", kClip[] = "--clip-grad",
               kMicro[] = "--micro-batch-size", kStyle[] = "--lr-decay-style", kIters[] = "--train-iters",
               kSeed[] = "--seed", kMeta[] = "--init-model-with-meta-device", kLoad[] = "--load",
               kHfModel[] = "--hf-model", kRecipe[] = "--fp8-recipe", kSave[] = "--save",
               kSaveInterval[] = "--save-interval", kLogInterval[] = "--log-interval", kAsync[] = "--async-save",
               kNoLoadOptim[] = "--no-load-optim", kNoLoadRng[] = "--no-load-rng", kNoSaveOptim[] = "--no-save-optim",
               kNoSaveRng[] = "--no-save-rng", kDeterministic[] = "--deterministic-mode", kLoraR[] = "--lora-r",
               kLoraAlpha[] = "--lora-alpha", kLoraDropout[] = "--lora-dropout",
               kLoraTargets[] = "--lora-target-modules", kMuonMomentum[] = "--muon-momentum",
               kNsSteps[] = "--muon-num-ns-steps", kMuonScale[] = "--muon-extra-scale-factor";

double share(const V& value) {
  const double ratio = value.number();
  if (!(ratio >= 0 && ratio <= 1)) value.expected("a number from 0 to 1");
  return ratio;
}

void take_optimizer(const V& value, R& run, A& arguments) {
  const auto name = value.text();
  if (name == "adamw_swap") {
    run.unused.push_back(value.key + ": adamw_swap, which is adamw (offload_to_cpu keeps its states in host memory)");
  } else if (name == "muon") {
    if (!arguments.is_given("optimizer")) arguments.optimizer = OptimizerKind::kMuon;
  } else if (name != "adamw") {
    value.expected_one_of({"adamw", "adamw_swap", "muon"});
  }
}

/// A checkpoint, or a folder of Hugging Face weights, as MindSpeed-MM tells them apart.
void take_load(const V& value, R& run, A& arguments) {
  const fs::path folder = value.text();
  if (arguments.is_given("load")) return;
  run.load = folder;
  run.loads_hf = has_hf_weights(folder.string());
  set_unless_given(run.loads_hf ? kHfModel : kLoad, value, arguments);
}

template <std::string R::*field>
void take_format(const V& value, R& run, A&) {
  const auto format = value.text();
  if (format != "auto" && format != "dcp" && format != "hf") value.expected_one_of({"auto", "dcp", "hf"});
  run.*field = format;
}

void take_save_format(const V& value, R& run, A& arguments) {
  take_format<&R::save_format>(value, run, arguments);
  if (run.save_format == "hf") value.fail("is hf; write dcp, and give --save-hf DIR for Hugging Face files");
}

template <std::vector<std::string> R::*field>
void take_patterns(const V& value, R& run, A&) {
  const auto patterns = value.list("a list of modules, as in [model.layers.{*}]");
  (run.*field).insert((run.*field).end(), patterns.begin(), patterns.end());
}

template <std::vector<std::string> Float8Modules::*field>
void take_float8(const V& value, R& run, A&) {
  const auto patterns = value.list("a list of modules, as in [model.layers.{*}]");
  (run.float8.*field).insert((run.float8.*field).end(), patterns.begin(), patterns.end());
}

const MindSpeedKey kTraining[] = {
    {"lr", mindspeed_flag<kLr>},
    {"lr_min", mindspeed_flag<kMinLr>},
    {"lr_start", mindspeed_flag<kWarmupInit>},
    {"lr_decay_style", mindspeed_flag<kStyle>},
    {"lr_decay_ratio", [](const V& value, R& run, A&) { run.decay_ratio = share(value); }},
    {"lr_warmup_ratio", [](const V& value, R& run, A&) { run.warmup_ratio = share(value); }},
    {"weight_decay", mindspeed_flag<kDecay>},
    {"optimizer", take_optimizer},
    {"adam_beta1", mindspeed_flag<kBeta1>},
    {"adam_beta2", mindspeed_flag<kBeta2>},
    {"adam_eps", mindspeed_flag<kEps>},
    {"muon_momentum", mindspeed_flag<kMuonMomentum>},
    {"ns_steps", mindspeed_flag<kNsSteps>},
    {"matched_adamw_rms", mindspeed_flag<kMuonScale>},
    {"clip_grad", mindspeed_flag<kClip>},
    {"micro_batch_size", mindspeed_flag<kMicro>},
    {"gradient_accumulation_steps",
     [](const V& value, R& run, A&) { run.gradient_accumulation_steps = value.integer(1); }},
    {"train_iters", mindspeed_flag<kIters>},
    {"train_epochs", [](const V& value, R& run, A&) { run.epochs = value.integer(1); }},
    {"seed", mindspeed_flag<kSeed>},
    {"init_model_with_meta_device", mindspeed_flag<kMeta>},
    {"load", take_load},
    {"load_format", take_format<&R::load_format>},
    {"save", mindspeed_flag<kSave>},
    {"save_interval", mindspeed_flag<kSaveInterval>},
    {"save_async", mindspeed_flag<kAsync>},
    {"log_interval", mindspeed_flag<kLogInterval>},
    {"no_load_optim", mindspeed_flag<kNoLoadOptim>},
    {"no_load_rng", mindspeed_flag<kNoLoadRng>},
    {"no_save_optim", mindspeed_flag<kNoSaveOptim>},
    {"no_save_rng", mindspeed_flag<kNoSaveRng>},
    {"use_deter_comp", mindspeed_flag<kDeterministic>},
    {"save_format", take_save_format},
    {"save_ckpt_dtype", nullptr, "fp32", "checkpoints hold weights as they are"},
    {"val_interval", nullptr, "0", "an evaluation has --eval-iters batches; give it with --eval-interval"},
    {"no_decay_modules", nullptr, "", "give --param-group-overrides \"*norm*:wd_mult=0\""},
    {"no_decay_params", nullptr, "", "give --param-group-overrides \"*.bias:wd_mult=0\""},
    {"lr_scaling_plan", nullptr, "", "give --param-group-overrides \"PATTERN:lr_mult=X\""},
    {"adam_fused"},
    {"clip_grad_foreach"},
    {"mem_fraction_static"},
    {"enable_full_determinism"},
    {"ckpt_manager"},
    {"load_strict"},
    {"load_rank0_and_broadcast"},
    {"allow_hf32"},
    {"val_micro_batch_size"},
    {"manual_gc_interval"},
    {"plugin"},
    {"profile"},
};

void take_recipe(const V& value, R&, A& arguments) {
  if (value.text() != "mxfp8") value.fail("is " + value.text() + "; write mxfp8, or remove the plan");
  set_unless_given(kRecipe, value, arguments);
  if (!arguments.is_given("fp8_format")) arguments.fp8_format = Fp8Format::kE4m3;
}

/// Experts compute in fp8 by a converter of their own.
void take_converters(const V& value, R& run, A&) {
  const std::set<std::string> known = {"quantize.linear.mx", "quantize.moe.mx"};
  const auto names = value.list("a list of quantize.linear.mx and quantize.moe.mx");
  const std::set<std::string> given(names.begin(), names.end());
  for (const auto& name : given) {
    if (!known.contains(name)) value.fail("has " + name + "; write quantize.linear.mx and quantize.moe.mx");
  }
  if (!given.contains("quantize.linear.mx")) value.fail("leaves linear layers out; write quantize.linear.mx, too");
  if (!given.contains("quantize.moe.mx")) run.float8.ignored.emplace_back("*.experts");
}

/// Keys that apply if `recipe_name` is set.
const MindSpeedKey kQuantisation[] = {
    {"recipe_name", take_recipe},
    {"apply_modules", take_float8<&Float8Modules::only>},
    {"ignored_modules", take_float8<&Float8Modules::ignored>},
    {"quant_converters", take_converters},
    {"extra_args"},
    {"enable_fsdp_low_precision_all_gather"},  // weights are gathered as without fp8
    {"fsdp_low_precision_all_gather_mode"},
};

/// Keys that apply if `enable` is set.
const MindSpeedKey kLora[] = {
    {"rank", mindspeed_flag<kLoraR>},
    {"alpha", mindspeed_flag<kLoraAlpha>},
    {"dropout", mindspeed_flag<kLoraDropout>},
    {"target_modules", mindspeed_flag<kLoraTargets>},
    {"init_lora_weights", nullptr, "true", "adapters begin as PEFT's default says"},
    {"pretrained_lora_path", nullptr, "", "adapters come from --load here"},
    {"enable"},
    {"lora_target_modules_support"},
    {"disable_peft_moe_conversion"},
};

const MindSpeedKey kFeatures[] = {
    {"recompute", [](const V& value, R& run, A&) { run.recomputes = value.boolean(); }},
    {"enable_activation_offload", [](const V& value, R& run, A&) { run.offloads = value.boolean(); }},
    {"enable_ep_balance", nullptr, "false", "every expert has its ranks for the whole run"},
    {"skip_moe_pad_tokens"},  // padding has no loss and does not count for the balance
    {"enable_chunk_loss"},    // affects the memory of the loss only
    {"enable_dynamic_chunk_loss"},
    {"chunkloss_plan"},
    {"enable_chunk_mbs"},
    {"chunkmbs_plan"},
    {"ep_balance_plan"},
};

const MindSpeedKey kRecompute[] = {
    {"apply_modules", take_patterns<&R::recompute_modules>},
    {"use_reentrant", [](const V& value, R& run, A&) { run.recompute_reentrant = value.boolean(); }},
};

const MindSpeedKey kOffload[] = {{"apply_modules", take_patterns<&R::offload_modules>}};

}  // namespace
}  // namespace mindspeed_training

std::span<const MindSpeedSection> mindspeed_training_sections() {
  static const MindSpeedSection sections[] = {
      {"training", mindspeed_training::kTraining},
      {"training.quantization_plan", mindspeed_training::kQuantisation},
      {"training.lora", mindspeed_training::kLora},
      {"features", mindspeed_training::kFeatures},
      {"features.loss_cfg", mindspeed_loss_keys()},
      {"features.recompute_plan", mindspeed_training::kRecompute},
      {"features.activation_offload_plan", mindspeed_training::kOffload},
  };
  return sections;
}

void set_unless_given(const char* flag, const YamlValue& value, Arguments& arguments) {
  const Option& option = *find_option(flag);
  if (!arguments.is_given(option.name)) set_option(option, value, arguments);
}

}  // namespace megashard
