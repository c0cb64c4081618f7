#include "launch/train/pretrain.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "checkpoint/values/tensor_info.h"
#include "framework/arguments/argument_table.h"
#include "framework/process_group/launch_environment.h"
#include "framework/training/flops.h"
#include "framework/training/start_log.h"
#include "framework/training/trainer.h"
#include "framework/training/unit_planner.h"
#include "launch/arguments/command_line.h"
#include "launch/output/status_line.h"
#include "launch/output/terminal.h"
#include "launch/train/device_report.h"
#include "launch/train/end_of_document.h"
#include "launch/train/session.h"
#include "models/hugging_face/publish_weights.h"
#include "models/hugging_face/save_hf_model.h"
#include "parallel/device/buffer_pool.h"
#include "parallel/device/cuda_module.h"
#include "parallel/fsdp/unit_trace.h"

namespace megashard {
namespace {

constexpr int kExitInterrupted = 130;  // exit code that shells expect of a program ended by SIGINT

// Used by the signal handler.
std::atomic<const char*> last_words = nullptr;  // null: the first interrupt is only recorded
std::atomic<bool> says_them = false;
std::atomic<int> exit_signal = 0;
std::atomic<bool> exit_asked = false, interrupt_asked = false;

constexpr const char* kTwice =
    "megashard: interrupted twice: the run ends at once, and what was being saved does not count\n";

void on_signal(int signal) {
  const char* words = last_words;
  const bool is_exit = signal == exit_signal && (signal != SIGINT || words == nullptr);
  auto& asked = is_exit ? exit_asked : interrupt_asked;
  if (is_exit || words == nullptr) {
    if (!asked.exchange(true) || signal != SIGINT) return;
    words = kTwice;
  }
  if (says_them && write(STDERR_FILENO, words, std::strlen(words)) < 0) _exit(kExitInterrupted);
  _exit(kExitInterrupted);
}

/// Makes Ctrl-C end this process at once, whatever the ranks wait for, with `message` on stderr if `speaks`. If the
/// caller ignores SIGINT (nohup), it stays ignored. With --exit-signal-handler, --exit-signal is recorded for
/// stop_request().
void watch_signals(const Arguments& arguments, const char* message, bool speaks, const DiagnosticSink& sink) {
  says_them = speaks;
  last_words = message;
  if (arguments.exit_signal_handler) {
    exit_signal = static_cast<int>(arguments.exit_signal);
    std::signal(exit_signal, on_signal);
  } else if (arguments.is_given("exit_signal")) {
    sink(Severity::kWarning, "--exit-signal " + choice_name("exit_signal", arguments.exit_signal) +
                                 " needs --exit-signal-handler; without it the signal ends the run "
                                 "and saves nothing.");
  }
  if (std::signal(SIGINT, on_signal) == SIG_IGN && exit_signal != SIGINT) std::signal(SIGINT, SIG_IGN);
}

/// Replaces the message of later interrupts.
void end_at_interrupt(const char* message) { last_words = message; }

/// Makes the first Ctrl-C set stop_request(), and the second end the process.
void finish_step_at_interrupt() { last_words = nullptr; }

StopRequest stop_request() {
  if (interrupt_asked) return StopRequest::kInterrupt;
  return exit_asked ? StopRequest::kExit : StopRequest::kNone;
}

int64_t peak_memory_bytes(c10::Device device) {
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[0].peak;
  }
  std::ifstream status("/proc/self/status");  // getrusage includes the peak of the parent process
  int64_t kibibytes = 0;
  for (std::string word; kibibytes == 0 && status >> word;) {
    if (word == "VmHWM:") status >> kibibytes;
  }
  return kibibytes * 1024;
}

int64_t live_memory_bytes(c10::Device device) {
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[0].current;
  }
  return cpu_buffer_pool_bytes();
}

/// Traces the first steps for --fsdp-schedule-trace.
class ScheduleTracer : public Listener {
 public:
  ScheduleTracer(const std::string& folder, torch::nn::Module& model, int rank)
      : path_(std::filesystem::path(folder) / c10::str("rank_", rank, ".json")),
        rank_(rank),
        trace_(std::make_unique<ScheduleTrace>(model)) {}
  void weights_updated(int64_t) override {
    constexpr int kTracedSteps = 3;
    if (trace_ == nullptr) return;
    std::filesystem::create_directories(path_.parent_path());
    trace_->write_chrome_trace(path_, rank_);
    if (++steps_ == kTracedSteps) trace_.reset();
  }

 private:
  std::filesystem::path path_;
  int rank_, steps_ = 0;
  std::unique_ptr<ScheduleTrace> trace_;
};

/// From the first step on, Ctrl-C ends training after a step.
struct Interrupts : Listener {
  void training_starts(const TrainingRun&) override { finish_step_at_interrupt(); }
};

TrainerCallbacks trainer_callbacks(const Arguments& arguments, const ProcessGroupPtr& group, c10::Device device,
                                   at::ScalarType computed_in, std::chrono::steady_clock::time_point start) {
  const int rank = group->rank();
  TrainerCallbacks callbacks;
  callbacks.print_on_first_rank = [rank](const std::string& line) {
    if (rank == 0) print_over_status(line);
  };
  callbacks.stop_request = stop_request;
  callbacks.peak_memory_bytes = [device] { return peak_memory_bytes(device); };
  callbacks.live_memory_bytes = [device] { return live_memory_bytes(device); };
  callbacks.program_start = start;
  const bool has_terminal = rank == 0 && standard_output().is_there;
  callbacks.listeners.push_back(std::make_shared<Interrupts>());
  if (has_terminal) callbacks.listeners.push_back(std::make_shared<StatusLine>());
  callbacks.peak_tflops = arguments.peak_tflops;
  const bool needs_peak = arguments.metrics_file || arguments.prometheus_file || (has_terminal && !device.is_cpu());
  if (!callbacks.peak_tflops && needs_peak && rank == 0) {
    callbacks.peak_tflops = device.is_cpu()
                                ? measured_cpu_tflops(computed_in)
                                : gpu_peak_tflops(load_cuda_module().device_name(device.index()), computed_in);
  }
  return callbacks;
}

UnitPlannerOptions unit_planner_options(const Arguments& arguments, const TrainerCallbacks& callbacks) {
  UnitPlannerOptions options;
  options.memory_budget = [mib = arguments.fsdp2_plan_memory_mib, peak = callbacks.peak_memory_bytes] {
    return mib ? *mib << 20 : peak() / 10;
  };
  if (arguments.save) options.file = *arguments.save + "/fsdp2_plan.yaml";
  options.print = callbacks.print_on_first_rank;
  return options;
}

void add_listeners(const Arguments& arguments, MultiModalModule& model, const ProcessGroupPtr& world,
                   c10::Device device, TrainerCallbacks& callbacks) {
  auto& listeners = callbacks.listeners;
  if (arguments.fsdp_schedule_trace)
    listeners.push_back(std::make_shared<ScheduleTracer>(*arguments.fsdp_schedule_trace, model, world->rank()));
  if (arguments.fsdp2_plan == "auto")
    listeners.push_back(
        std::make_shared<UnitPlanner>(model, world, device, unit_planner_options(arguments, callbacks)));
  if (arguments.publish_weights) listeners.push_back(publish_weights(model, arguments, world));
  if (!arguments.log_host_syncs) return;
  if (auto log = host_sync_log(device, callbacks.sink)) listeners.push_back(std::move(log));
}

/// Prints counts for a model before sharding.
void print_parameter_counts(const torch::nn::Module& model) {
  int64_t elements = 0, trainable = 0;
  std::unordered_set<const c10::TensorImpl*> counted;  // tied parameters appear several times
  for (const auto& parameter : model.parameters()) {
    if (!counted.insert(parameter.unsafeGetTensorImpl()).second) continue;
    elements += parameter.numel();
    if (parameter.requires_grad()) trainable += parameter.numel();
  }
  print_line(parameter_count_line(elements));
  print_line(trainable_parameters_line(trainable, elements));
}

/// While a model is created, full tensors are allocated and freed between shards that stay. On the C library's heap
/// each would leave a hole that does not fit an aligned block of the same size, and a rank would end up with the memory
/// of the whole model.
void give_freed_memory_back() { mallopt(M_MMAP_THRESHOLD, 128 << 10); }

/// Gradients and activations are allocated and freed every step; returning their memory to the kernel would cost a page
/// fault for every 4 KiB on reuse.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

}  // namespace

int run_pretrain(int argc, char** argv, DryRun dry_run) {
  const auto start = std::chrono::steady_clock::now();
  give_freed_memory_back();
  CommandLine line;
  try {
    line = parse_arguments(argc, argv);
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  if (line.own.contains(kDryRun)) return dry_run(line);
  for (const char* flag : {kWorldSize, kMachine})
    line.mistakes.require(!line.own.contains(flag),
                          std::string(flag) + " is for --dry-run; leave it out, or add that.");
  const RendezvousOptions environment = ranks_of_launcher(line.arguments);
  const DiagnosticSink sink = sink_for(environment.rank, line.arguments.logging_level);
  for (const auto& notice : line.notices) sink(Severity::kNotice, notice);
  const RunPlan plan = plan_run(std::move(line), {}, environment, sink);
  const Arguments& arguments = plan.arguments;
  watch_signals(arguments, "megashard: interrupted before the first step; nothing was trained or saved\n",
                environment.rank == 0, sink);
  if (environment.rank == 0) {
    print_line(sizes_line(arguments));
    print_line(arguments_banner(arguments));
    if (!arguments.hf_model && arguments.padded_vocab_size)
      print_line(padded_vocab_line(unpadded_vocab_size(arguments), *arguments.padded_vocab_size));
  }

  std::optional<ProgressLine> progress;
  if (environment.rank == 0) progress.emplace([&sink](const std::string& text) { sink(Severity::kNotice, text); });
  const ProcessGroupPtr group = join_world(plan, environment);
  nlohmann::ordered_json config_to_save;
  const auto generators_seeded = [&] {
    at::globalContext().setDeterministicAlgorithms(arguments.deterministic_mode, /*warn_only=*/false);
    const auto* file = plan.hf_config ? &*plan.hf_config : nullptr;
    if (arguments.save_hf) config_to_save = prepare_hf_model(arguments, file, group);
  };
  const auto model_built = [&](const MultiModalModule& model) {
    if (environment.rank == 0) print_parameter_counts(model);
  };
  const Session session = open_session(plan, group, sink, {generators_seeded, model_built});
  MultiModalModule& model = session.model();
  const c10::Device device = session.device;

  TrainerCallbacks callbacks = trainer_callbacks(arguments, group, device, session.computed_in, start);
  callbacks.sink = sink;
  const auto reference = open_reference(plan, session.groups, sink);
  if (reference) callbacks.reference = &reference->model();
  add_listeners(arguments, model, group, device, callbacks);
  DataOptions data = data_options(arguments, model.vocab_size(), end_of_document_id(arguments), sink);
  const bool is_general = arguments.attention_mask_type == AttentionMaskType::kGeneral;
  require(
      model.latent_patches() || !is_general,
      "--attention-mask-type general: attention is causal and over the whole sequence in a model of tokens; leave it "
      "out.");
  if (const auto patches = model.latent_patches()) {
    data.latents = {
        .patches = *patches, .run = *arguments.global_batch_size, .caption_dropout = arguments.caption_dropout_rate};
  } else {
    require(arguments.caption_dropout_rate == 0, "--caption-dropout-rate is for a model of latents; leave it out.");
  }
  Trainer trainer(plan_training(arguments, data), model, session.groups, device, std::move(callbacks));
  if (session.from.source == WeightSource::kCheckpoint) trainer.load(session.from.step, session.from.weights_only);
  TrainingEnd end = TrainingEnd::kDone;
  if (arguments.ckpt_convert_format) {
    end_at_interrupt("megashard: interrupted while the checkpoint was converted; it is not whole\n");
    trainer.convert_checkpoint();
  } else {
    keep_freed_memory();
    std::optional<PooledLargeTensors> pooled;
    if (device.is_cpu()) pooled.emplace();
    end = trainer.train();
    end_at_interrupt("megashard: interrupted after training; what --save-hf was writing is not whole\n");
  }
  if (end == TrainingEnd::kInterrupted) {
    if (arguments.save_hf) sink(Severity::kNotice, "--save-hf " + *arguments.save_hf + " was not written");
    group->barrier();
    return kExitInterrupted;
  }
  if (arguments.save_hf) {
    sink(Severity::kNotice, "saving the weights as Hugging Face files to " + *arguments.save_hf + " in " +
                                torch_dtype_name(hf_model_dtype(arguments)));
    save_hf_model(model, config_to_save, arguments, group);
    sink(Severity::kNotice, "  successfully saved Hugging Face files to " + *arguments.save_hf);
  }
  group->barrier();
  log_findings(device, sink);
  trainer.check_last_save();
  return 0;
}

}  // namespace megashard
