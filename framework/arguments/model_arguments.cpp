#include "framework/arguments/model_arguments.h"

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
           "registered model; unset: what --hf-model's config.json names, or the flags' network")
      .shown_as("NAME");
}

void add_initialization(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("initialization", rows);
  group.add("--seed", &A::seed, kReport, "of weights, dropout and data order");
  group.add("--data-parallel-random-init", &A::data_parallel_random_init, kFree,
            "other random numbers on each data parallel rank");
  group.add("--init-method-std", &A::init_method_std, kFree, "standard deviation of fresh weights").at_least(0);
  group.add("--init-method-xavier-uniform", &A::init_method_xavier_uniform, kFree, "")
      .refuse("fresh weights are drawn from a normal distribution; leave it out and choose its width "
              "by --init-method-std");
  group.add("--no-initialization", &A::perform_initialization, kFree, "leave weights unset: they are loaded")
      .turns_off()
      .named("perform_initialization");
  group.add("--use-cpu-initialization", &A::use_cpu_initialization, kFree, "")
      .no_effect("fresh weights are always drawn on the CPU");
  group.add("--init-model-with-meta-device", &A::init_model_with_meta_device, kFree,
            "build without memory, shard, then fill each rank's part");
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
  group.add("--bf16", &A::bf16, kReport,
            "STORE parameters in bf16; to compute in bf16 with fp32 weights set param_dtype: bf16 "
            "in the FSDP2 file instead");
  group.add("--downcast-to-bf16", &A::downcast_to_bf16, kReport, "")
      .refuse("weights are loaded as they were saved; to compute in bf16 set param_dtype: bf16 in the "
              "FSDP2 file, to store them in bf16 give --bf16");
  group.computed("params_dtype", &A::params_dtype);
  group.refused("--fp16", 0,
                "fp16 needs loss scaling, which FSDP2 training here does not have; use "
                "param_dtype: bf16 in the "
                "FSDP2 file, or --bf16");
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

void derive_precision(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.bf16) return;
  arguments.params_dtype = "bf16";
  sink(Severity::kNotice, "--bf16 stores the parameters in bf16, and the optimizer steps fp32 copies of them; to store "
                          "them in fp32 only and compute in bf16, leave it out and set param_dtype: bf16 in the FSDP2 "
                          "file.");
}

}  // namespace megashard::detail
