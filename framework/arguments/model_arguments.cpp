#include "framework/arguments/model_arguments.h"

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;

void add_source(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("model source", rows);
  group
      .add("--hf-model", &A::hf_model, kFree,
           "Hugging Face directory: config.json and weights; a size flag that contradicts it is "
           "an error")
      .shown_as("DIR")
      .alias("--init-from-hf-path");
  group.add("--from-scratch", &A::from_scratch, kFree, "with --hf-model: its architecture, fresh weights");
  group.add("--model-plugin", &A::model_plugin, kFree, "shared library that registers models of your own")
      .shown_as("FILE");
  group
      .add("--model", &A::model, kFree,
           "name of a registered model; unset: the family of --hf-model's config.json, or the network of flags")
      .shown_as("NAME");
  group
      .add("--mm-model", &A::mm_model, kFree,
           "MindSpeed-MM's model section, JSON or YAML: what is frozen, the model's folder")
      .shown_as("FILE");
  group
      .add("--mm-data", &A::mm_data, kFree,
           "its data section: conversations, and how they are prepared; --data-path wins over it")
      .shown_as("FILE");
  group.add("--mm-tool", &A::mm_tool, kFree, "its profilers, which are not used here").shown_as("FILE");
}

void add_initialization(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("initialization", rows);
  group.add("--seed", &A::seed, kReport, "of weights, dropout and data order");
  group.add("--data-parallel-random-init", &A::data_parallel_random_init, kFree,
            "different random numbers on each data parallel rank");
  group.add("--init-method-std", &A::init_method_std, kFree, "standard deviation of fresh weights").at_least(0);
  group.add("--init-method-xavier-uniform", &A::init_method_xavier_uniform, kFree, "")
      .refuse("fresh weights are drawn from a normal distribution; leave it out and choose its width "
              "by --init-method-std");
  group
      .add("--no-initialization", &A::perform_initialization, kFree,
           "do not initialise weights: they are loaded, or drawn with --init-model-with-meta-device")
      .turns_off()
      .named("perform_initialization");
  group.add("--use-cpu-initialization", &A::use_cpu_initialization, kFree, "")
      .no_effect("fresh weights are always drawn on the CPU");
  group.add("--init-model-with-meta-device", &A::init_model_with_meta_device, kFree,
            "construct on the meta device, shard, then initialise each rank's part");
}

void add_regularization(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("regularization", rows);
  group.add("--attention-dropout", &A::attention_dropout, kReport, "dropout of attention weights")
      .at_least(0)
      .below(1)
      .taken_from_checkpoint();
  group.add("--hidden-dropout", &A::hidden_dropout, kReport, "dropout of the residual stream")
      .at_least(0)
      .below(1)
      .taken_from_checkpoint();
}

void add_precision(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("mixed precision", rows);
  OptionGroup scaling("mixed precision", rows, {.pretrain_only = true});
  group.add("--fp16", &A::fp16, kReport,
            "STORE parameters in fp16, and scale losses; to compute in fp16 with fp32 weights set param_dtype: fp16 "
            "in the FSDP2 file instead, which scales too");
  group.add("--bf16", &A::bf16, kReport,
            "STORE parameters in bf16; to compute in bf16 with fp32 weights set param_dtype: bf16 "
            "in the FSDP2 file instead");
  scaling.add("--loss-scale", &A::loss_scale, kReport, "constant loss scale; unset or 0: dynamic with fp16, else none")
      .at_least(0);
  scaling.add("--initial-loss-scale", &A::initial_loss_scale, kReport, "first value of a dynamic loss scale").above(0);
  scaling.add("--min-loss-scale", &A::min_loss_scale, kReport, "least value of a dynamic loss scale").above(0);
  scaling
      .add("--loss-scale-window", &A::loss_scale_window, kReport,
           "steps in a row without overflow before a dynamic loss scale is doubled")
      .at_least(1);
  scaling
      .add("--hysteresis", &A::hysteresis, kReport,
           "overflows until a dynamic loss scale is halved; the count restarts when it is doubled")
      .at_least(1);
  group.add("--downcast-to-bf16", &A::downcast_to_bf16, kReport,
            "round loaded weights to bf16 values; their dtype does not change");
  scaling.choice("--fp8-format", &A::fp8_format, kReport, {{"e4m3", Fp8Format::kE4m3}, {"hybrid", Fp8Format::kHybrid}},
                 "compute linear layers except the output's in fp8: e4m3, or hybrid: gradients in e5m2");
  scaling
      .choice("--fp8-recipe", &A::fp8_recipe, kReport,
              {{"delayed", Fp8Recipe::kDelayed}, {"tensorwise", Fp8Recipe::kTensorwise}, {"mxfp8", Fp8Recipe::kMxfp8}},
              "scales of --fp8-format: tensorwise: one per tensor, from its current values; mxfp8: a power of two per "
              "32 numbers")
      .refuse_values({"blockwise", "custom"}, "there are tensorwise and mxfp8; use one of them");
  scaling.choice("--fp4-format", &A::fp4_format, kReport, {{"e2m1", Fp4Format::kE2m1}},
                 "compute linear layers except the output's in fp4, which rounds gradients at random");
  scaling
      .choice("--fp4-recipe", &A::fp4_recipe, kReport, {{"nvfp4", Fp4Recipe::kNvfp4}},
              "scales of --fp4-format: one per 16 numbers in e4m3, and one per tensor")
      .refuse_values({"custom"}, "there is nvfp4; leave it out");
  scaling.add("--first-last-layers-bf16", &A::first_last_layers_bf16, kReport,
              "leave the first and last layers out of --fp8-format or --fp4-format");
  scaling
      .add("--num-layers-at-start-in-bf16", &A::num_layers_at_start_in_bf16, kReport,
           "how many first ones --first-last-layers-bf16 leaves out")
      .at_least(0);
  scaling
      .add("--num-layers-at-end-in-bf16", &A::num_layers_at_end_in_bf16, kReport,
           "how many last ones --first-last-layers-bf16 leaves out")
      .at_least(0);
  group.computed("params_dtype", &A::params_dtype);
  group.refused("--fp16-lm-cross-entropy", 0, "the loss is computed in fp32; leave it out");
  group.refused("--fp32-residual-connection", 0, "the residual stream has the dtype of the parameters; leave it out");
  group.refused("--grad-reduce-in-bf16", 0,
                "with FSDP2 gradients are reduced in the file's reduce_dtype; set reduce_dtype: bf16 there");
}

}  // namespace

void add_model_options(std::vector<Option>& rows) {
  add_source(rows);
  add_initialization(rows);
  add_regularization(rows);
  add_precision(rows);
}

void check_model_source(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.from_scratch || arguments.hf_model,
                "--from-scratch needs --hf-model, whose config.json describes the model; without it "
                "weights are fresh anyway.");
  rules.require(!arguments.model_plugin || arguments.model || arguments.hf_model,
                "--model-plugin " + arguments.model_plugin.value_or("") +
                    " needs --model, the name under which it registers the model.");
  rules.require(!arguments.is_own_model() || !arguments.save_hf || arguments.hf_model,
                "--save-hf needs --hf-model here: only it has the config.json of a model of "
                "--model-plugin.");
}

void check_precision(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.fp16 || !arguments.bf16,
                "--fp16 and --bf16 exclude each other: parameters are stored in one dtype; keep one.");
  rules.require(arguments.min_loss_scale <= arguments.initial_loss_scale,
                "--min-loss-scale " + argument_text(arguments.min_loss_scale) + " is above --initial-loss-scale " +
                    argument_text(arguments.initial_loss_scale) + ", where the scale starts; lower it.");
  rules.require(!arguments.fp8_format || arguments.fp8_recipe != Fp8Recipe::kDelayed,
                "--fp8-format needs --fp8-recipe tensorwise or mxfp8: Megatron's default, delayed, takes scales from "
                "earlier steps, which this program does not.");
  rules.require(!arguments.fp8_format || !arguments.fp4_format,
                "--fp8-format and --fp4-format exclude each other; keep one.");
  rules.require(!arguments.first_last_layers_bf16 || arguments.fp8_format || arguments.fp4_format,
                "--first-last-layers-bf16 needs --fp8-format or --fp4-format, which it leaves layers out of.");
}

void derive_precision(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink) {
  const bool steps = parts.training && !arguments.skip_train;
  if (arguments.fp16 || arguments.bf16) {
    const std::string dtype = arguments.fp16 ? "fp16" : "bf16";
    arguments.params_dtype = dtype;
    if (steps || arguments.is_given(dtype)) {
      sink(Severity::kNotice, "--" + dtype + " stores the parameters in " + dtype +
                                  (steps ? ", and the optimizer steps fp32 copies of them" : "") +
                                  "; to store them in fp32 only and compute in " + dtype +
                                  ", leave it out and set param_dtype: " + dtype + " in the FSDP2 file.");
    }
  }
  arguments.gradients_in_fp16 = arguments.gradients_in_fp16 || arguments.fp16;
  if (!steps) return;
  const bool is_dynamic = arguments.gradients_in_fp16 && !arguments.has_constant_loss_scale();
  if (is_dynamic && arguments.check_for_nan_in_loss_and_grad) {
    arguments.check_for_nan_in_loss_and_grad = false;
    sink(Severity::kNotice, "the loss scale is dynamic: a loss or gradient that is no number does not end the run but "
                            "skips the step and lowers the scale, as in Megatron.");
  }
  for (const char* name : {"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"}) {
    if (is_dynamic || !arguments.is_given(name)) continue;
    sink(Severity::kNotice,
         find_argument(name)->flag + " has no effect: it is of a dynamic loss scale, and " +
             (arguments.has_constant_loss_scale() ? "--loss-scale gives a constant one." : "only fp16 has one."));
  }
}

}  // namespace megashard::detail
