#include "framework/arguments/argument_table.h"

namespace megashard::detail {

namespace {

using A = Arguments;

constexpr const char* kPartOfExpert =
    "experts are recomputed whole, by --recompute-modules moe, or one by one by modules in the "
    "FSDP2 file";
constexpr const char* kNormsAlone =
    "the next projection keeps its output anyway; recompute_modules with recompute_save_ops "
    "[aten::mm] in the FSDP2 file recomputes norms and activations, and keeps products";

void add_loop(std::vector<Option>& rows) {
  OptionGroup group("training", rows);
  group.add("--micro-batch-size", &A::micro_batch_size, "sequences of one forward on one rank");
  group.add("--global-batch-size", &A::global_batch_size,
            "sequences of one step; unset: micro batch size * data parallel size");
  group
      .add("--rampup-batch-size", &A::rampup_batch_size,
           "start, increment and samples of a growing global batch, with --train-samples")
      .count(3);
  group.add("--decrease-batch-size-if-needed", &A::decrease_batch_size_if_needed,
            "shrink the global batch to a multiple of micro batch * data parallel size");
  group.add("--train-iters", &A::train_iters, "steps of the whole training");
  group.add("--train-samples", &A::train_samples, "sequences of the whole training, instead of --train-iters");
  group.add("--exit-interval", &A::exit_interval, "save and exit when the step is a multiple of it");
  group.add("--exit-duration-in-mins", &A::exit_duration_in_mins, "save and exit after so many minutes");
  group.add("--exit-signal-handler", &A::exit_signal_handler, "on --exit-signal save and exit");
  group.add("--exit-signal", &A::exit_signal, "the signal of --exit-signal-handler")
      .one_of({"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"});
  group
      .add("--no-check-for-nan-in-loss-and-grad", &A::check_for_nan_in_loss_and_grad,
           "go on when the loss or a gradient is not a number")
      .turns_off()
      .named("check_for_nan_in_loss_and_grad");
  group.add("--calculate-per-token-loss", &A::calculate_per_token_loss,
            "average over all tokens of the global batch, not over microbatches");
  group.add("--empty-unused-memory-level", &A::empty_unused_memory_level,
            "return cached GPU memory: 0 never, 1 before, 2 also after the optimizer");
  group
      .add("--deterministic-mode", &A::deterministic_mode,
           "only deterministic kernels; an operator that has none is an error")
      .alias("--use-deter-comp");
  group.add("--skip-train", &A::skip_train, "evaluate only");
  group.computed("consumed_train_samples", &A::consumed_train_samples);
  group.computed("consumed_valid_samples", &A::consumed_valid_samples);
}

void add_activations(std::vector<Option>& rows) {
  OptionGroup group("activations", rows);
  group.add("--recompute-activations", &A::recompute_activations, "the same as --recompute-granularity selective");
  group
      .add("--recompute-granularity", &A::recompute_granularity,
           "full: whole layers are computed again in backward; selective: --recompute-modules")
      .one_of({"full", "selective"});
  group
      .add("--recompute-method", &A::recompute_method,
           "of full: uniform recomputes all layers, block the first --recompute-num-layers")
      .one_of({"uniform", "block"});
  group.add("--recompute-num-layers", &A::recompute_num_layers, "see --recompute-method");
  group.add("--recompute-modules", &A::recompute_modules, "of selective; unset: core_attn")
      .one_of({"core_attn", "mlp", "moe"})
      .refuse_values({"layernorm"}, kNormsAlone)
      .refuse_values({"moe_act"}, kPartOfExpert)
      .refuse_values({"shared_experts"}, "no model here has shared experts")
      .refuse_values({"mla_up_proj"}, "no model here has multi-latent attention");
  group.add("--cpu-offloading-num-layers", &A::cpu_offloading_num_layers,
            "keep the activations of the first so many layers in host memory until backward");
  group.add("--fine-grained-activation-offloading", &A::fine_grained_activation_offloading,
            "keep the activations of --offload-modules in host memory until backward");
  group.add("--offload-modules", &A::offload_modules, "parts of a layer, for --fine-grained-activation-offloading")
      .one_of({"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"})
      .refuse_values({"expert_fc1", "moe_act"}, kPartOfExpert);
  group.add("--min-offloaded-tensor-size", &A::min_offloaded_tensor_size,
            "tensors of fewer elements are not offloaded");
}

void add_optimizer(std::vector<Option>& rows) {
  OptionGroup group("optimizer", rows);
  group.add("--optimizer", &A::optimizer, "adam is AdamW; muon steps matrices, and AdamW what is none")
      .one_of({"adam", "sgd", "muon"})
      .refuse_values({"dist_muon"}, "muon shards its states and shares its work as they are; use muon");
  group
      .add("--optimizer-selection", &A::optimizer_selection,
           "MindSpeed-MM's choice of AdamW; all that are accepted mean the fused one of LibTorch")
      .one_of({"fused_adamw", "fused_torch_adamw"})
      .in_vain("both mean the fused AdamW of LibTorch, which is always used");
  group.add("--weight-decay", &A::weight_decay, "decoupled; biases and 1-D parameters have none");
  group.add("--start-weight-decay", &A::start_weight_decay, "first value of an increasing weight decay");
  group.add("--end-weight-decay", &A::end_weight_decay, "last value of an increasing weight decay");
  group.add("--weight-decay-incr-style", &A::weight_decay_incr_style, "how the weight decay increases")
      .one_of({"constant", "linear", "cosine"});
  group.add("--clip-grad", &A::clip_grad, "largest gradient norm; 0 does not clip");
  group.add("--adam-beta1", &A::adam_beta1, "decay of the first moment");
  group.add("--adam-beta2", &A::adam_beta2, "decay of the second moment");
  group.add("--adam-eps", &A::adam_eps, "added to the denominator");
  group.add("--sgd-momentum", &A::sgd_momentum, "momentum of --optimizer sgd");
  group.add("--muon-momentum", &A::muon_momentum, "momentum of --optimizer muon");
  group.add("--muon-use-nesterov", &A::muon_use_nesterov, "Nesterov's momentum");
  group.add("--muon-no-split-qkv", &A::muon_split_qkv, "a fused q, k and v projection is one matrix, not three")
      .turns_off()
      .named("muon_split_qkv");
  group.add("--muon-scale-mode", &A::muon_scale_mode, "how a matrix's sizes scale its update")
      .one_of({"spectral", "shape_scaling", "unit_rms_norm"});
  group
      .add("--muon-fp32-matmul-prec", &A::muon_fp32_matmul_prec,
           "of the Newton-Schulz steps on a GPU: highest is fp32, the others let it use TF32")
      .one_of({"medium", "high", "highest"});
  group.add("--muon-coefficient-type", &A::muon_coefficient_type, "polynomial of the Newton-Schulz steps")
      .one_of({"quintic", "simple"});
  group.add("--muon-num-ns-steps", &A::muon_num_ns_steps, "Newton-Schulz steps");
  group.add("--muon-extra-scale-factor", &A::muon_extra_scale_factor, "multiplies each update");
  group.add("--lr-mult", &A::lr_mult, "multiplies the learning rate of --lr-scale-modules, as MindSpeed-MM");
  group.add("--lr-scale-modules", &A::lr_scale_modules, "parts of the names of parameters that --lr-mult is for")
      .of_kind("NAME");
  group
      .add("--weight-decay-exclude-modules", &A::weight_decay_exclude_modules,
           "parts of the names of parameters without weight decay, as MindSpeed-MM")
      .of_kind("NAME");
  group
      .add("--param-group-overrides", &A::param_group_overrides,
           "PATTERN:SETTING=NUMBER,... for parameters whose names match: lr_mult, wd_mult, beta1, beta2")
      .of_kind("OVERRIDE");
}

void add_learning_rate(std::vector<Option>& rows) {
  OptionGroup group("learning rate", rows);
  group.add("--lr", &A::lr, "largest learning rate");
  group.add("--lr-decay-style", &A::lr_decay_style, "from the largest to --min-lr")
      .one_of({"constant", "linear", "cosine", "inverse-square-root", "WSD"});
  group.add("--lr-wsd-decay-style", &A::lr_wsd_decay_style, "the anneal of WSD")
      .one_of({"exponential", "linear", "cosine"});
  group.add("--lr-decay-iters", &A::lr_decay_iters, "steps of the decay; unset: --train-iters");
  group.add("--lr-decay-samples", &A::lr_decay_samples, "sequences of the decay; unset: --train-samples");
  group.add("--lr-wsd-decay-iters", &A::lr_wsd_decay_iters, "steps of the anneal of WSD");
  group.add("--lr-wsd-decay-samples", &A::lr_wsd_decay_samples, "sequences of the anneal of WSD");
  group.add("--lr-warmup-fraction", &A::lr_warmup_fraction, "part of the decay that is warm-up");
  group.add("--lr-warmup-iters", &A::lr_warmup_iters, "steps of warm-up");
  group.add("--lr-warmup-samples", &A::lr_warmup_samples, "sequences of warm-up");
  group.add("--lr-warmup-init", &A::lr_warmup_init, "learning rate at the start of warm-up");
  group.add("--min-lr", &A::min_lr, "smallest learning rate");
  group.add("--override-opt_param-scheduler", &A::override_opt_param_scheduler,
            "the flags beat the schedule of a loaded checkpoint");
  group.add("--use-checkpoint-opt_param-scheduler", &A::use_checkpoint_opt_param_scheduler,
            "the schedule of a loaded checkpoint beats the flags");
}

void add_validation(std::vector<Option>& rows) {
  OptionGroup group("validation", rows);
  group.add("--eval-iters", &A::eval_iters, "global batches of one evaluation; 0: none");
  group.add("--eval-interval", &A::eval_interval, "steps between evaluations");
  group.add("--test-mode", &A::test_mode, "").in_vain("it belongs to Megatron's own tests");
}

void add_logging(std::vector<Option>& rows) {
  OptionGroup group("logging", rows);
  group.add("--log-interval", &A::log_interval, "steps between log lines; the first and the last step have one, too");
  group.add("--log-params-norm", &A::log_params_norm, "norm of the parameters in the log line");
  group.add("--log-num-zeros-in-grad", &A::log_num_zeros_in_grad, "zeros among the gradients in the log line");
  group.add("--log-throughput", &A::log_throughput, "TFLOP/s per device in the log line");
  group.add("--log-tokens-per-second", &A::log_tokens_per_second,
            "tokens a second, of all ranks, at the end of the log line");
  group.add("--log-memory", &A::log_memory, "peak memory of the largest rank, in MiB, at the end of the log line");
  group
      .add("--timing-log-level", &A::timing_log_level,
           "parts of a step below the log line: 1 those that a step has once, 2 those of each "
           "microbatch, too; both wait for the GPU at each part")
      .one_of({"0", "1", "2"});
  group
      .add("--timing-log-option", &A::timing_log_option,
           "with it, of the ranks' times: the largest, least and largest, or all")
      .one_of({"max", "minmax", "all"});
  group.add("--print-all-arguments", &A::print_all_arguments,
            "at the start also arguments that are at their defaults, as Megatron");
  group.add("--log-progress", &A::log_progress, "")
      .in_vain("there is no progress.txt; --metrics-file has a line for every step");
  group.add("--log-tps", &A::log_tps, "tokens per sample in the log line, as MindSpeed-MM");
  group.add("--metrics-file", &A::metrics_file, "one JSON object a step, in full precision, by rank 0").of_kind("FILE");
  group.add("--peak-tflops", &A::peak_tflops,
            "peak of one device, for mfu; unset: the device's, on a CPU a measured matrix product");
}

}  // namespace

void add_training_options(std::vector<Option>& rows) {
  add_loop(rows);
  add_activations(rows);
  add_optimizer(rows);
  add_learning_rate(rows);
  add_validation(rows);
  add_logging(rows);
}

}  // namespace megashard::detail
