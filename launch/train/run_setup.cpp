#include "launch/train/run_setup.h"

#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/manifest.h"
#include "framework/arguments/argument_validation.h"
#include "framework/modules/freeze.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/process_group/gpu_device.h"
#include "framework/process_group/launcher_variables.h"
#include "framework/training/random_states.h"
#include "framework/training/training_checkpoint.h"
#include "framework/training/training_log.h"
#include "launch/arguments/model_folder.h"
#include "launch/output/print_line.h"
#include "launch/train/model_plugin.h"
#include "models/lora/lora.h"
#include "models/register_models.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/collectives/rendezvous.h"

namespace megashard {
namespace {

Strictness strictness_of(const Arguments& arguments) {
  return arguments.fsdp2_config_strict ? Strictness::kStrict : Strictness::kWarn;
}

Fsdp2Config sharding_config(const Arguments& arguments, const std::optional<RollWorker>& worker,
                            const DiagnosticSink& sink) {
  if (arguments.fsdp2_config_path)
    return load_fsdp2_config(*arguments.fsdp2_config_path, strictness_of(arguments), sink);
  if (worker) return worker->sharding;
  Fsdp2Config config;
  if (!arguments.use_torch_fsdp2) config.sharding_size = 1;
  return config;
}

/// MindSpeed says in the FSDP2 file what is a flag in Megatron.
void take_expert_ranks(const Fsdp2Config& config, Arguments& arguments, const DiagnosticSink& sink) {
  const int ranks = config.expert_parallel_size;
  if (ranks == 1 || arguments.is_given("expert_model_parallel_size")) return;
  arguments.expert_model_parallel_size = ranks;
  sink(Severity::kNotice, c10::str("FSDP2: expert_parallel_size: as --expert-model-parallel-size ", ranks));
}

/// --load without a checkpoint: refused where only its weights can be meant.
void go_on_without_checkpoint(const Arguments& arguments, const DiagnosticSink& sink) {
  const auto tracker = (std::filesystem::path(*arguments.load) / "latest_checkpointed_iteration.txt").string();
  const auto missing = tracker + " does not exist, so there is nothing to load";
  require(!arguments.ckpt_convert_format, "--ckpt-convert-format: " + missing);
  require(!arguments.exit_on_missing_checkpoint, "--exit-on-missing-checkpoint: " + missing);
  require(!arguments.skip_train,
          "--load " + *arguments.load + ": " + missing +
              ", and nothing is trained: give the folder of the checkpoint, or leave --load out");
  const bool has_files = arguments.hf_model && !arguments.from_scratch;
  const auto weights = arguments.pretrained_checkpoint
                           ? "--pretrained-checkpoint " + *arguments.pretrained_checkpoint
                           : (has_files ? "--hf-model " + *arguments.hf_model : std::string());
  sink(Severity::kNotice, missing_checkpoint_lines(tracker, weights));
}

/// What --load means from here on: a step's own folder may have been given.
std::string parent_of(const CheckpointStep& step) { return std::filesystem::path(step.folder).parent_path().string(); }

}  // namespace

DiagnosticSink sink_for(int rank) {
  return [rank](Severity severity, const std::string& message) {
    if (rank == 0) print_line((severity == Severity::kWarning ? "WARNING: " : "") + message);
  };
}

ShardingPlan validate_for_machine(Arguments& arguments, const std::optional<RollWorker>& worker,
                                  const RendezvousOptions& environment, const DiagnosticSink& sink, Mistakes found) {
  ShardingPlan plan{.config = {}, .recompute_reentrant = worker && worker->recompute_reentrant};
  std::vector<std::pair<Severity, std::string>> told;  // of the file, for a run that starts
  found.attempt([&] {
    plan.config = sharding_config(arguments, worker, [&told](Severity severity, const std::string& message) {
      told.emplace_back(severity, message);
    });
    take_expert_ranks(plan.config, arguments, sink);
  });
  if (arguments.hf_model) found.attempt([&] { require_model_folder("--hf-model", *arguments.hf_model); });
  validate_arguments(arguments,
                     {.world_size = environment.world_size,
                      .rank = environment.rank,
                      .has_gpu = take_device(arguments.device),
                      .cuda_device_max_connections = own_variable("CUDA_DEVICE_MAX_CONNECTIONS"),
                      .nccl_algo = own_variable("NCCL_ALGO")},
                     sink, std::move(found));
  for (const auto& [severity, message] : told) sink(severity, message);
  return plan;
}

ProcessGroupPtr join_world(const Arguments& arguments, RendezvousOptions options) {
  if (arguments.distributed_init_method) options.init_method = *arguments.distributed_init_method;
  options.backend = *arguments.distributed_backend;
  options.timeout = std::chrono::minutes(arguments.distributed_timeout_minutes);
  // The first rank of each host speaks for it.
  if (options.local_rank <= 0 || options.local_world_size == 0) options.notice = print_line;
  return init_process_group(options);
}

c10::Device device_of(const ProcessGroupPtr& group) {
  return DeviceMesh(std::vector<ProcessGroupPtr>{group}, {}).device();
}

void seed_generators(const Arguments& arguments, int rank, c10::Device device) {
  const int64_t seed = arguments.seed + (arguments.data_parallel_random_init ? 10 * rank : 0);
  seed_random_states(static_cast<uint64_t>(seed), device);
}

Start find_start(Arguments& arguments, const ProcessGroupPtr& group, const DiagnosticSink& sink) {
  const FindOptions find{.ckpt_step = arguments.ckpt_step,
                         .depth = arguments.verify_checkpoint ? VerifyDepth::kBytes : VerifyDepth::kSizes,
                         .notice = [&sink](const std::string& line) { sink(Severity::kWarning, line); }};
  if (arguments.load) {
    if (const auto step = find_step(*arguments.load, group, find)) {
      arguments.load = parent_of(*step);
      return {WeightSource::kCheckpoint, *step, may_lack_weights(arguments)};
    }
    go_on_without_checkpoint(arguments, sink);
  }
  if (arguments.pretrained_checkpoint) {
    const std::string& folder = *arguments.pretrained_checkpoint;
    const auto step = find_step(folder, group, find);
    if (!step) {
      throw UsageError("--pretrained-checkpoint " + folder +
                       " holds no checkpoint (no latest_checkpointed_iteration.txt); check the "
                       "path, or leave it out");
    }
    arguments.load = parent_of(*step);
    arguments.finetune = true;
    return {WeightSource::kCheckpoint, *step, may_lack_weights(arguments)};
  }
  if (arguments.hf_model && !arguments.from_scratch) return {WeightSource::kHuggingFace};
  if (!arguments.perform_initialization) {
    sink(Severity::kWarning, "--no-initialization: no weights are loaded either, so training starts from whatever the "
                             "layers' constructors left; give --load or --hf-model, or leave it out");
  }
  return {WeightSource::kInitialisation, {}, true};
}

BuiltModel build_model(const Arguments& arguments, bool initialises) {
  ModelRegistry registry;
  register_models(registry);
  if (arguments.model_plugin) load_model_plugin(*arguments.model_plugin, registry);
  const auto make = [&] {
    auto model = registry.create(arguments, arguments.model.value_or(""));
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

void freeze_model(const Arguments& arguments, const BuiltModel& built, const DiagnosticSink& sink) {
  if (auto* mixin = dynamic_cast<FSDP2Mixin*>(built.model.get())) mixin->freeze();
  const auto& prefixes = arguments.freeze_module_prefix;
  if (const int64_t frozen = freeze_parameters(*built.model, prefixes); frozen > 0)
    sink(Severity::kNotice, c10::str("--freeze-module-prefix: ", frozen, " elements are frozen"));
}

at::ScalarType shard_model(const Arguments& arguments, const ShardingPlan& plan, const BuiltModel& built,
                           const ProcessGroupPtr& group, bool initialises, const DiagnosticSink& sink) {
  auto* mixin = dynamic_cast<FSDP2Mixin*>(built.model.get());
  TORCH_CHECK(mixin != nullptr, "the model ", built.model->class_name(),
              " does not derive from FSDP2Mixin, so it cannot be sharded");
  const at::ScalarType stored = arguments.bf16 ? at::kBFloat16 : at::kFloat;
  const at::ScalarType computed = plan.config.mixed_precision.param_dtype.value_or(stored);
  if (computed == at::kHalf && !arguments.skip_train) {
    throw UsageError("param_dtype: fp16 needs loss scaling, which training here does not have; take bf16.");
  }
  ActivationPlan activations = activation_plan(arguments);
  activations.recompute_reentrant = plan.recompute_reentrant;
  mixin->fully_shard({.process_group = group,
                      .config = plan.config,
                      .strictness = strictness_of(arguments),
                      .sink = sink,
                      .activations = activations,
                      .init_tape = built.tape.get(),
                      .weights_follow = !initialises && !arguments.lora_r,
                      .unset_weights_follow = arguments.lora_r.has_value(),
                      .trains = !arguments.skip_train});
  return computed;
}

}  // namespace megashard
