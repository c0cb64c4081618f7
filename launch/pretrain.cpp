#include "launch/pretrain.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "checkpoint/checkpoint.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/checkpoint_arguments.h"
#include "framework/modules/deferred_init.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/training/flops.h"
#include "framework/training/random_states.h"
#include "framework/training/trainer.h"
#include "framework/training/training_log.h"
#include "launch/command_line.h"
#include "launch/end_of_document.h"
#include "launch/environment.h"
#include "models/load_hf_weights.h"
#include "models/lora.h"
#include "models/model_config.h"
#include "models/register_models.h"
#include "models/save_hf_model.h"
#include "parallel/collectives/rendezvous.h"
#include "parallel/cuda/cuda_module.h"
#include "parallel/fsdp/schedule_trace.h"

namespace megashard {
namespace {

std::atomic<bool> terminated = false;  // written by the signal handler

void note_signal(int) { terminated = true; }

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

void print_flushed(const std::string& line) {
  std::cout << line << std::endl;  // flushed: logs are followed while the run goes on
}

DiagnosticSink sink_for(int rank) {
  return [rank](Severity severity, const std::string& sentence) {
    if (rank == 0) print_flushed((severity == Severity::kWarning ? "WARNING: " : "") + sentence);
  };
}

bool gpu_present() {
  return std::filesystem::exists("/dev/nvidia0") && load_cuda_module().device_count() > 0;
}

ProcessGroupPtr join_world(const Arguments& arguments, RendezvousOptions options) {
  if (arguments.distributed_init_method) options.init_method = *arguments.distributed_init_method;
  options.backend = *arguments.distributed_backend;
  options.timeout = std::chrono::minutes(arguments.distributed_timeout_minutes);
  return init_process_group(options);
}

void seed_generators(const Arguments& arguments, int rank, c10::Device device) {
  const int64_t seed = arguments.seed + (arguments.data_parallel_random_init ? 10 * rank : 0);
  seed_random_states(static_cast<uint64_t>(seed), device);
}

Fsdp2Config sharding_config(const Arguments& arguments, Strictness strictness,
                            const DiagnosticSink& sink) {
  if (arguments.fsdp2_config_path)
    return load_fsdp2_config(*arguments.fsdp2_config_path, strictness, sink);
  Fsdp2Config config;
  if (!arguments.use_torch_fsdp2) config.sharding_size = 1;
  return config;
}

/// Where the first weights come from.
enum class WeightSource { kCheckpoint, kHuggingFace, kInitialisation };

struct Start {
  WeightSource source;
  CheckpointStep step{};     ///< of kCheckpoint
  bool initialises = false;  ///< the layers' first values count
};

/// Collective; --pretrained-checkpoint becomes --load and --finetune.
Start find_start(Arguments& arguments, const ProcessGroupPtr& group, const DiagnosticSink& sink) {
  const FindOptions find{
      .ckpt_step = arguments.ckpt_step,
      .depth = arguments.verify_checkpoint ? VerifyDepth::kBytes : VerifyDepth::kSizes,
      .notice = [&sink](const std::string& line) { sink(Severity::kWarning, line); }};
  if (arguments.load) {
    if (const auto step = find_step(*arguments.load, group, find))
      return {WeightSource::kCheckpoint, *step, may_lack_weights(arguments)};
    const auto tracker =
        (std::filesystem::path(*arguments.load) / "latest_checkpointed_iteration.txt").string();
    if (arguments.exit_on_missing_checkpoint || arguments.ckpt_convert_format) {
      throw UsageError((arguments.ckpt_convert_format ? "--ckpt-convert-format: "
                                                      : "--exit-on-missing-checkpoint: ") +
                       tracker + " does not exist, so there is nothing to load");
    }
    sink(Severity::kNotice, missing_checkpoint_lines(tracker));
  }
  if (arguments.pretrained_checkpoint) {
    const std::string& folder = *arguments.pretrained_checkpoint;
    const auto step = find_step(folder, group, find);
    if (!step) {
      throw UsageError("--pretrained-checkpoint " + folder +
                       " holds no checkpoint (no latest_checkpointed_iteration.txt); check the "
                       "path, or leave it out");
    }
    arguments.load = folder;
    arguments.finetune = true;
    return {WeightSource::kCheckpoint, *step, may_lack_weights(arguments)};
  }
  if (arguments.hf_model && !arguments.from_scratch) return {WeightSource::kHuggingFace};
  if (!arguments.perform_initialization) {
    sink(Severity::kWarning,
         "--no-initialization: no weights are loaded either, so training starts from whatever the "
         "layers' constructors left; give --load or --hf-model, or leave it out");
  }
  return {WeightSource::kInitialisation, {}, true};
}

struct BuiltModel {
  std::shared_ptr<MultiModalModule> model;
  std::unique_ptr<InitTape> tape;
};

BuiltModel build_model(const Arguments& arguments, bool initialises) {
  ModelRegistry registry;
  register_models(registry);
  const auto make = [&] {
    auto model = registry.create(arguments);
    auto* init = dynamic_cast<WeightInitMixin*>(model.get());
    if (initialises && arguments.perform_initialization && init != nullptr) init->init_weights();
    if (arguments.lora_r) {
      add_lora(*model, {.rank = *arguments.lora_r,
                        .alpha = arguments.lora_alpha,
                        .dropout = arguments.lora_dropout,
                        .target_modules = arguments.lora_target_modules});
    }
    if (arguments.bf16) model->to(at::kBFloat16);
    return model;
  };
  BuiltModel built;
  if (arguments.init_model_with_meta_device) {
    built.tape = std::make_unique<InitTape>();
    built.model = built.tape->construct(make);
    built.tape->capture(*built.model);
  } else {
    built.model = make();
  }
  return built;
}

void shard_model(const Arguments& arguments, const BuiltModel& built, const ProcessGroupPtr& group,
                 bool initialises, const DiagnosticSink& sink) {
  auto* mixin = dynamic_cast<FSDP2Mixin*>(built.model.get());
  TORCH_CHECK(mixin != nullptr, "the model ", built.model->class_name(), " does not derive from FSDP2Mixin, so it cannot be sharded");
  const auto strictness = arguments.fsdp2_config_strict ? Strictness::kStrict : Strictness::kWarn;
  mixin->freeze();
  mixin->fully_shard({.process_group = group,
                      .config = sharding_config(arguments, strictness, sink),
                      .strictness = strictness,
                      .sink = sink,
                      .activations = activation_plan(arguments),
                      .init_tape = built.tape.get(),
                      .weights_follow = !initialises && !arguments.lora_r,
                      .unset_weights_follow = arguments.lora_r.has_value()});
}

DataOptions data_options(const Arguments& arguments, int64_t vocab_size) {
  DataOptions options;
  options.data_path = arguments.data_path;
  options.split = arguments.split.value_or("969,30,1");
  options.train_data_path = arguments.train_data_path;
  options.valid_data_path = arguments.valid_data_path;
  options.test_data_path = arguments.test_data_path;
  options.mock_data = arguments.mock_data;
  options.seq_length = *arguments.seq_length;
  options.seed = arguments.seed;
  options.vocab_size = vocab_size;
  options.eod_id = end_of_document_id(arguments);
  return options;
}

int64_t peak_memory_bytes(c10::Device device) {
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[0].peak;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

/// Traces the first steps for --fsdp-schedule-trace; called after each step.
std::function<void()> schedule_tracer(const std::string& folder, torch::nn::Module& model,
                                      int rank) {
  constexpr int kTracedSteps = 3;
  std::filesystem::create_directories(folder);
  const auto path = std::filesystem::path(folder) / c10::str("rank_", rank, ".json");
  auto trace = std::make_shared<ScheduleTrace>(model);
  return [trace, path, rank, steps = 0]() mutable {
    if (trace == nullptr) return;
    trace->write_chrome_trace(path, rank);
    if (++steps == kTracedSteps) trace.reset();
  };
}

TrainerSurroundings surroundings(const Arguments& arguments, const ProcessGroupPtr& group,
                                 c10::Device device, std::chrono::steady_clock::time_point start) {
  const int rank = group->rank(), last = group->size() - 1;
  TrainerSurroundings outside;
  outside.print_on_first_rank = [rank](const std::string& line) {
    if (rank == 0) print_flushed(line);
  };
  outside.print_on_last_rank = [rank, last](const std::string& line) {
    if (rank == last) print_flushed(line);
  };
  outside.stop_signal = [] { return terminated.load(); };
  outside.peak_memory_bytes = [device] { return peak_memory_bytes(device); };
  outside.program_start = start;
  outside.peak_tflops = arguments.peak_tflops;
  if (!outside.peak_tflops && arguments.metrics_file && rank == 0 && device.is_cpu()) {
    outside.peak_tflops = measured_cpu_tflops(at::kFloat);
  }
  return outside;
}

/// While a model is made, whole tensors come and go between the rows that stay. On the C library's
/// heap each would leave a hole in which an aligned block of the same size finds no room, and a
/// rank would end with the memory of the whole model.
void give_freed_memory_back() { mallopt(M_MMAP_THRESHOLD, 128 << 10); }

/// Gradients and activations come and go every step; memory that the C library hands back to the
/// kernel each time costs a page fault for every 4 KiB when it is taken again.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

}  // namespace

int run_pretrain(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  give_freed_memory_back();
  Arguments arguments;
  try {
    arguments = parse_arguments(argc, argv);
  } catch (const HelpRequested& help) {
    std::cout << help.what();
    return 0;
  }
  const RendezvousOptions environment = read_environment().rendezvous;
  const DiagnosticSink sink = sink_for(environment.rank);
  if (arguments.use_checkpoint_args) take_checkpoint_arguments(arguments, sink);
  validate_arguments(arguments,
                     {.world_size = environment.world_size,
                      .rank = environment.rank,
                      .has_gpu = arguments.device != "cpu" && gpu_present(),
                      .cuda_device_max_connections = variable("CUDA_DEVICE_MAX_CONNECTIONS"),
                      .nccl_algo = variable("NCCL_ALGO")},
                     sink);
  take_network_from_hf_model(arguments);
  if (environment.rank == 0) {
    print_flushed(sizes_line(arguments));
    print_flushed(arguments_banner(arguments));
  }
  if (arguments.exit_signal_handler) std::signal(SIGTERM, note_signal);

  const ProcessGroupPtr group = join_world(arguments, environment);
  const c10::Device device =
      group->device_type() == c10::kCPU
          ? c10::Device(c10::kCPU)
          : c10::Device(group->device_type(),
                        static_cast<c10::DeviceIndex>(environment.local_rank));
  seed_generators(arguments, group->rank(), device);
  at::globalContext().setDeterministicAlgorithms(arguments.deterministic_mode, /*warn_only=*/false);
  if (arguments.save_hf) prepare_hf_model(arguments, group);
  const Start from = find_start(arguments, group, sink);
  const BuiltModel built = build_model(arguments, from.initialises);
  shard_model(arguments, built, group, from.initialises, sink);
  if (from.source == WeightSource::kHuggingFace || arguments.lora_r)
    load_hf_weights(*built.model, *arguments.hf_model);

  TrainerSurroundings outside = surroundings(arguments, group, device, start);
  if (arguments.fsdp_schedule_trace)
    outside.after_step =
        schedule_tracer(*arguments.fsdp_schedule_trace, *built.model, group->rank());
  Trainer trainer(arguments, *built.model, group, device,
                  data_options(arguments, built.model->vocab_size()), std::move(outside));
  if (from.source == WeightSource::kCheckpoint) trainer.load(from.step);
  if (arguments.ckpt_convert_format) {
    trainer.convert_checkpoint();
  } else {
    keep_freed_memory();
    trainer.train();
  }
  if (arguments.save_hf) {
    sink(Severity::kNotice, "saving the weights as Hugging Face files to " + *arguments.save_hf);
    save_hf_model(*built.model, arguments, group);
    sink(Severity::kNotice, "  successfully saved Hugging Face files to " + *arguments.save_hf);
  }
  group->barrier();
  return 0;
}

}  // namespace megashard
