#include "framework/arguments/logging_arguments.h"

#include "framework/arguments/arguments.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;

}  // namespace

void add_logging_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("logging", rows, {.pretrain_only = true});
  group
      .add("--log-interval", &A::log_interval, kFree,
           "steps between log lines; the first and the last step also have one")
      .above(0);
  OptionGroup everywhere("logging", rows);
  everywhere
      .add("--logging-level", &A::logging_level, kFree,
           "lines besides Megatron's, by Python's levels: up to 20 notices and warnings, up to 30 warnings, above "
           "neither")
      .at_least(0);
  group.add("--log-params-norm", &A::log_params_norm, kFree, "norm of the parameters in the log line");
  group.add("--log-num-zeros-in-grad", &A::log_num_zeros_in_grad, kFree, "zeros among the gradients in the log line");
  group.add("--log-throughput", &A::log_throughput, kFree, "TFLOP/s per device in the log line");
  group.add("--log-tokens-per-second", &A::log_tokens_per_second, kFree,
            "tokens per second over all ranks, at the end of the log line");
  group.add("--log-memory", &A::log_memory, kFree,
            "maximum of the ranks' peak memory, in MiB, at the end of the log line; classes of rank 0's peak");
  group
      .add("--timing-log-level", &A::timing_log_level, kFree,
           "times of a step's parts after the log line: 1 parts of the whole step, 2 also those of each microbatch; "
           "both wait for the GPU at each part")
      .one_of({"0", "1", "2"});
  group.choice("--timing-log-option", &A::timing_log_option, kFree,
               {{"max", TimingLogOption::kMax}, {"minmax", TimingLogOption::kMinMax}, {"all", TimingLogOption::kAll}},
               "with --timing-log-level: the maximum of the ranks' times, minimum and maximum, or all");
  group.add("--print-all-arguments", &A::print_all_arguments, kFree,
            "print all arguments at the start, also defaults, as Megatron does");
  group.add("--log-progress", &A::log_progress, kFree, "")
      .no_effect("there is no progress.txt; --metrics-file has a line for every step");
  group.add("--log-tps", &A::log_tps, kFree, "tokens per sample in the log line, as MindSpeed-MM");
  group.add("--metrics-file", &A::metrics_file, kFree, "one JSON object a step, in full precision, by rank 0")
      .shown_as("FILE");
  group
      .add("--prometheus-file", &A::prometheus_file, kFree,
           "the last step's metrics, for node_exporter's textfile collector")
      .shown_as("FILE");
  group.add("--tensorboard-dir", &A::tensorboard_dir, kFree, "event files with Megatron's tags, by rank 0")
      .shown_as("DIR");
  group
      .add("--tensorboard-log-interval", &A::tensorboard_log_interval, kFree,
           "steps between points of TensorBoard's curves")
      .above(0);
  group.add("--log-timers-to-tensorboard", &A::log_timers_to_tensorboard, kFree,
            "add iteration-time to TensorBoard, and with --log-throughput throughput");
  group.add("--log-validation-ppl-to-tensorboard", &A::log_validation_ppl_to_tensorboard, kFree,
            "add perplexities of evaluations to TensorBoard");
  group.add("--log-memory-to-tensorboard", &A::log_memory_to_tensorboard, kFree,
            "add the maximum of the ranks' peak memory to TensorBoard");
  group.add("--log-world-size-to-tensorboard", &A::log_world_size_to_tensorboard, kFree,
            "add world-size to TensorBoard");
  group
      .add("--no-log-loss-scale-to-tensorboard", &A::log_loss_scale_to_tensorboard, kFree,
           "no loss-scale in TensorBoard")
      .turns_off()
      .named("log_loss_scale_to_tensorboard")
      .alias("--disable-log-loss-scale-to-tensorboard");
  group.add("--profile", &A::profile, kFree, "a Chrome trace of some steps by LibTorch's profiler");
  group
      .add("--profile-step-start", &A::profile_step_start, kFree, "number of completed steps before the profile begins")
      .at_least(0);
  group.add("--profile-step-end", &A::profile_step_end, kFree, "number of completed steps when the profile ends")
      .above(0);
  group.add("--profile-ranks", &A::profile_ranks, kFree, "ranks that write a trace").shown_as("RANK ...");
  group.add("--profile-save-path", &A::profile_save_path, kFree, "folder of the traces; unset: --tensorboard-dir")
      .shown_as("DIR");
  group
      .add("--peak-tflops", &A::peak_tflops, kFree,
           "peak TFLOP/s of one device, for mfu; unset: the device's, on a CPU a measured matrix product")
      .above(0);
}

void check_logging(const Arguments& arguments, Mistakes& rules) {
  if (!arguments.profile) return;
  rules.require(arguments.profile_save_path || arguments.tensorboard_dir,
                "--profile needs a folder for its traces; give --profile-save-path or --tensorboard-dir.");
  rules.require(arguments.profile_step_start < arguments.profile_step_end,
                "--profile-step-end must be above --profile-step-start: the steps between them are profiled.");
}

}  // namespace megashard::detail
