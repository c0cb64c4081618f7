#include "framework/arguments/checkpoint_arguments.h"

#include <algorithm>
#include <string>

#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

void check_conversion(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.ckpt_convert_format || !arguments.ckpt_convert_save,
                "--ckpt-convert-save needs --ckpt-convert-format, the format to write.");
  if (!arguments.ckpt_convert_format) return;
  rules.require(arguments.load && arguments.ckpt_convert_save,
                "--ckpt-convert-format needs --load, the checkpoint, and --ckpt-convert-save, the folder "
                "to write to.");
}

}  // namespace

void add_checkpoint_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("checkpointing", rows);
  OptionGroup saving("checkpointing", rows, {.pretrain_only = true});
  saving.add("--save", &A::save, kFree, "folder for checkpoints").shown_as("DIR");
  saving.add("--save-interval", &A::save_interval, kFree, "steps between checkpoints")
      .alias("--persistent-save-interval")
      .above(0);
  saving
      .add("--async-save", &A::async_save, kFree,
           "training waits only until its state is copied to host memory; a thread writes it")
      .alias("--async-save-ckpt");
  saving
      .add("--max-failed-saves", &A::max_failed_saves, kFree,
           "end training after this many failed saves in a row; until then it continues with the older checkpoints")
      .above(0);
  saving.add("--most-recent-k", &A::most_recent_k, kFree, "keep the newest so many checkpoints of --save; unset: all")
      .alias("--keep-last-checkpoints")
      .above(0);
  saving
      .add("--save-retain-interval", &A::save_retain_interval, kFree,
           "also keep checkpoints whose step is a multiple of this; without --most-recent-k these and the newest")
      .above(0);
  saving.add("--save-best", &A::save_best, kFree,
             "also save after an evaluation with the lowest validation loss so far, and keep that checkpoint until a "
             "better one is there");
  saving.add("--overwrite-run", &A::overwrite_run, kFree,
             "--save may hold steps of another run: they are removed when this run's first step is "
             "complete");
  group
      .add("--load", &A::load, kFree,
           "folder of checkpoints, or of one step (DIR/best: of --save-best); replaces the weights of --hf-model")
      .shown_as("DIR");
  saving.add("--no-save-optim", &A::no_save_optim, kFree, "leave the optimizer out");
  saving.add("--no-save-rng", &A::no_save_rng, kFree, "leave random states out");
  group.add("--no-load-optim", &A::no_load_optim, kFree, "start with a fresh optimizer");
  group.add("--no-load-rng", &A::no_load_rng, kFree, "start with fresh random states");
  group.add("--finetune", &A::finetune, kFree, "load weights only and start at iteration 0");
  group
      .add("--pretrained-checkpoint", &A::pretrained_checkpoint, kFree,
           "loaded as with --finetune when --load has no checkpoint")
      .shown_as("DIR");
  group.add("--ckpt-step", &A::ckpt_step, kFree, "load this iteration instead of the latest").at_least(0);
  group
      .add("--no-verify-checkpoint", &A::verify_checkpoint, kFree,
           "before loading a checkpoint compare file lengths only, not checksums")
      .turns_off()
      .named("verify_checkpoint");
  group.add("--use-checkpoint-args", &A::use_checkpoint_args, kFree,
            "take network, dropouts, sequence length and tokenizer from the checkpoint if their flags are not given");
  group.choice(
      "--dist-ckpt-strictness", &A::dist_ckpt_strictness, kFree,
      {{"assume_ok_unexpected", StrictHandling::kAssumeOkUnexpected},
       {"log_unexpected", StrictHandling::kLogUnexpected},
       {"log_all", StrictHandling::kLogAll},
       {"raise_unexpected", StrictHandling::kRaiseUnexpected},
       {"raise_all", StrictHandling::kRaiseAll},
       {"return_unexpected", StrictHandling::kReturnUnexpected},
       {"return_all", StrictHandling::kReturnAll},
       {"ignore_all", StrictHandling::kIgnoreAll}},
      "names that only the checkpoint or only the run has: raise_* fails, log_* and return_* log them, ignore_all and "
      "assume_ok_* ignore them; unset: raise_all");
  group.add("--exit-on-missing-checkpoint", &A::exit_on_missing_checkpoint, kFree, "fail if --load has no checkpoint");
  group.add("--auto-detect-ckpt-format", &A::auto_detect_ckpt_format, kFree,
            "load a checkpoint of either format, not only of --ckpt-format");
  const auto refuse_formats = [](Option& option) {
    option
        .refuse_values({"zarr"}, "it is not part of this program, and Megatron gave it up; use torch_dist or "
                                 "torch_dcp")
        .refuse_values({"torch"}, "it keeps whole tensors, which FSDP2 does not have; use torch_dist or "
                                  "torch_dcp")
        .refuse_values({"fsdp_dtensor"}, "it belongs to Megatron's own FSDP; use torch_dist or torch_dcp");
  };
  refuse_formats(
      group.choice("--ckpt-format", &A::ckpt_format, kFree,
                   {{"torch_dist", CheckpointFormat::kTorchDist}, {"torch_dcp", CheckpointFormat::kTorchDcp}},
                   "format of checkpoints, saved and loaded"));
  saving.add("--ckpt-bare-names", &A::ckpt_bare_names, kFree,
             "write the weights of torch_dcp steps without the prefix model. (lm_head.weight), as PyTorch's "
             "dcp.save(model.state_dict()) and ROLL");
  refuse_formats(
      saving.choice("--ckpt-convert-format", &A::ckpt_convert_format, kFree,
                    {{"torch_dist", CheckpointFormat::kTorchDist}, {"torch_dcp", CheckpointFormat::kTorchDcp}},
                    "save the checkpoint of --load again in this format, and exit"));
  saving
      .add("--ckpt-convert-save", &A::ckpt_convert_save, kFree,
           "with --ckpt-convert-format: the folder in which DIR/torch_dist or DIR/torch_dcp is written")
      .shown_as("DIR");
  saving
      .add("--save-hf", &A::save_hf, kFree,
           "folder for the weights as Hugging Face files, which all ranks write when training "
           "ends")
      .shown_as("DIR");
  saving.add("--overwrite", &A::overwrite, kFree,
             "with --save-hf: the folder may hold weights, which are replaced when the new ones are "
             "complete, or a run's steps, which stay");
  saving.choice(
      "--save-hf-dtype", &A::save_hf_dtype, kFree,
      {{"fp32", HfDtype::kFp32}, {"fp16", HfDtype::kFp16}, {"bf16", HfDtype::kBf16}},
      "with --save-hf: dtype of the floating weights; unset: that of --hf-model's files, or of the parameters "
      "where these are stored in 16 bits or the network is of flags");
  saving
      .add("--publish-weights", &A::publish_weights, kFree,
           "folder in which the weights of each step appear for inference engines, bf16 safetensors in DIR/step_N with "
           "a file STABLE, written beside training (docs/reinforcement_learning.md)")
      .shown_as("DIR");
  saving.add("--publish-interval", &A::publish_interval, kFree, "with --publish-weights: steps between them").above(0);
  saving
      .add(
          "--publish-full-interval", &A::publish_full_interval, kFree,
          "with --publish-weights: every so many are whole, the others have the values that have changed; 1: all whole")
      .above(0);
  saving.add("--save-hf-stacked-experts", &A::save_hf_stacked_experts, kFree,
             "with --save-hf: the experts of a layer in gate_up_proj and down_proj, as transformers has "
             "them in memory");
}

void check_publishing(const Arguments& arguments, Mistakes& rules) {
  const auto& folder = arguments.publish_weights;
  for (const auto& [name, flag] : {std::pair{"publish_interval", "--publish-interval"},
                                   std::pair{"publish_full_interval", "--publish-full-interval"}}) {
    rules.require(folder || !arguments.is_given(name),
                  std::string(flag) + " needs --publish-weights, the folder in which the weights appear.");
  }
  rules.require(!folder || arguments.hf_model,
                "--publish-weights needs --hf-model, whose files inference engines load the weights with.");
  rules.require(arguments.publish_full_interval == 1 || !arguments.lora_r,
                "--publish-full-interval is for whole models; adapters are published whole, so leave it out.");
}

void check_checkpointing(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.save || arguments.save_interval,
                "--save " + arguments.save.value_or("") + " needs --save-interval, the steps between checkpoints.");
  rules.require(!arguments.save_interval || arguments.save,
                "--save-interval " + to_string(arguments.save_interval.value_or(0)) +
                    " needs --save, the folder for checkpoints; without it nothing would be saved.");
  rules.require(!arguments.save_best || arguments.save, "--save-best needs --save, the folder for checkpoints.");
  rules.require(!arguments.save_best || arguments.eval_iters > 0,
                "--save-best needs evaluations, whose loss tells which checkpoint is the best; give --eval-iters.");
  const int64_t retain = arguments.save_retain_interval.value_or(1);
  const int64_t interval = std::max<int64_t>(1, arguments.save_interval.value_or(1));
  rules.require(!arguments.save_retain_interval || retain % interval == 0,
                "--save-retain-interval " + to_string(retain) + " is no multiple of --save-interval " +
                    to_string(interval) + ", so nothing would be retained.");
  check_conversion(arguments, rules);
  const auto written = arguments.ckpt_convert_format.value_or(arguments.ckpt_format);
  rules.require(!arguments.ckpt_bare_names || written == CheckpointFormat::kTorchDcp,
                "--ckpt-bare-names is for --ckpt-format torch_dcp: Megatron finds the weights of torch_dist by other "
                "names.");
  rules.require(!arguments.save_hf_dtype || arguments.save_hf,
                "--save-hf-dtype needs --save-hf, the folder for Hugging Face files.");
  check_publishing(arguments, rules);
  const bool loads = arguments.load || arguments.pretrained_checkpoint;
  rules.require(!arguments.ckpt_step || arguments.load, "--ckpt-step " + to_string(arguments.ckpt_step.value_or(0)) +
                                                            " needs --load, the folder that has the step.");
  rules.require(!arguments.finetune || loads || arguments.hf_model,
                "--finetune needs --load, --pretrained-checkpoint or --hf-model, the weights to start from.");
  rules.require(!arguments.exit_on_missing_checkpoint || arguments.load,
                "--exit-on-missing-checkpoint needs --load, the folder to look in.");
}

}  // namespace megashard::detail
