#include "launch/train/run_plan.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/hugging_face/hf_files.h"
#include "framework/arguments/saved_arguments.h"
#include "framework/data/latent_set.h"
#include "framework/mistakes.h"
#include "framework/process_group/gpu_device.h"
#include "framework/process_group/launcher_variables.h"
#include "framework/training/training_data.h"
#include "launch/arguments/model_folder.h"
#include "launch/mindspeed/preparation.h"
#include "launch/roll/roll_keys.h"
#include "models/network_arguments.h"

namespace megashard {
namespace {

Strictness strictness_of(const Arguments& arguments) {
  return arguments.fsdp2_config_strict ? Strictness::kStrict : Strictness::kWarn;
}

Fsdp2Config sharding_config(const CommandLine& line, const DiagnosticSink& sink, KeyLog* log) {
  const Arguments& arguments = line.arguments;
  Fsdp2Config config;
  if (arguments.fsdp2_config_path) {
    config = load_fsdp2_config(*arguments.fsdp2_config_path, strictness_of(arguments), sink, log);
  } else if (line.worker) {
    return line.worker->sharding;
  } else if (!arguments.use_torch_fsdp2) {
    config.sharding_size = 1;
  }
  if (line.mindspeed) apply_mindspeed(*line.mindspeed, config);
  return config;
}

bool has_fp16(const MixedPrecisionPolicy& policy) {
  const auto dtypes = {policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.grad_dtype};
  return std::ranges::find(dtypes, at::kHalf) != dtypes.end();
}

/// Takes MindSpeed's key in the FSDP2 file for a setting that is a flag in Megatron.
void take_expert_ranks(const Fsdp2Config& config, Arguments& arguments, const DiagnosticSink& sink) {
  const int ranks = config.expert_parallel_size;
  if (ranks == 1 || arguments.is_given("expert_model_parallel_size")) return;
  arguments.expert_model_parallel_size = ranks;
  sink(Severity::kNotice, c10::str("FSDP2: expert_parallel_size: as --expert-model-parallel-size ", ranks));
}

int64_t samples_of_epoch(const Arguments& arguments) {
  if (!arguments.seq_length) {
    throw UsageError("num_train_epochs needs the length of a sequence; give sequence_length in the file, "
                     "--seq-length, or the length of the training by --train-iters.");
  }
  // The number of samples does not depend on the tokens.
  auto options = data_options(arguments, /*vocab_size=*/1, /*eod_id=*/0);
  options.valid_samples = options.test_samples = 0;
  return build_datasets(options).train->size();
}

/// ROLL's settings of a model that is not trained.
void take_inference_settings(RollWorker& worker, Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.is_given("micro_batch_size")) arguments.micro_batch_size = worker.infer_batch_size;
  const bool was_trained = std::exchange(worker.trains, false);
  if (was_trained || arguments.bf16 || arguments.fp16) return;  // a worker of fsdp2_train keeps fp32
  const auto& dtype = worker.sharding.mixed_precision.param_dtype;
  arguments.bf16 = dtype == at::kBFloat16;
  arguments.fp16 = dtype == at::kHalf;
  if (!arguments.bf16 && !arguments.fp16) return;
  sink(Severity::kNotice,
       "ROLL: " + worker.role + ": the weights are stored in its param_dtype, " + (arguments.bf16 ? "bf16" : "fp16"));
}

void apply_worker(RollWorker& worker, Arguments& arguments, const RunParts& parts, int64_t world_size,
                  const DiagnosticSink& sink) {
  if (!parts.training) take_inference_settings(worker, arguments, sink);
  if (parts.training && !worker.trains) {
    throw UsageError(worker.role + " is a worker of fsdp2_infer, which trains nothing; choose one "
                                   "of fsdp2_train.");
  }
  apply_roll_worker(
      worker, arguments, world_size, [&] { return samples_of_epoch(arguments); }, sink, parts);
  if (!parts.training || !parts.data) return;
  for (const auto* words : {&arguments.data_path, &arguments.train_data_path}) {
    for (const auto& prefix : parse_blend(*words).prefixes)
      require_pictures_prepared(prefix, worker.image_pixels, worker.role + ".model_args");
  }
}

}  // namespace

void apply_files(CommandLine& line, const RunParts& parts, int64_t world_size, const DiagnosticSink& sink) {
  Arguments& arguments = line.arguments;
  if (line.worker) apply_worker(*line.worker, arguments, parts, world_size, sink);
  if (!line.mindspeed) return;
  apply_mindspeed(
      *line.mindspeed, arguments, world_size, [&] { return samples_of_epoch(arguments); }, sink, line.mistakes, parts);
}

RunPlan validate_run(CommandLine line, const RunParts& parts, const RendezvousOptions& ranks,
                     const DiagnosticSink& sink, KeyLog* log) {
  Arguments& arguments = line.arguments;
  Mistakes& found = line.mistakes;
  ShardingPlan plan{.config = {},
                    .strictness = strictness_of(arguments),
                    .recompute_reentrant = line.worker && line.worker->recompute_reentrant,
                    .recompute_towers = line.worker && line.worker->trains && line.worker->recompute};
  std::vector<std::pair<Severity, std::string>> told;  // messages about the file, for runs that start
  found.attempt([&] {
    plan.config = sharding_config(
        line, [&told](Severity severity, const std::string& message) { told.emplace_back(severity, message); }, log);
    take_expert_ranks(plan.config, arguments, sink);
    arguments.gradients_in_fp16 = has_fp16(plan.config.mixed_precision);
  });
  if (arguments.hf_model) {
    const bool there = found.attempt([&] {
      require_model_folder("--hf-model", *arguments.hf_model);
      arguments.hf_model = model_of_pipeline("--hf-model", *arguments.hf_model);
    });
    if (there && line.mindspeed) found.attempt([&] { check_mindspeed_model(*line.mindspeed, arguments); });
  }
  try {
    validate_arguments(arguments,
                       {.world_size = ranks.world_size,
                        .rank = ranks.rank,
                        .has_gpu = take_device(arguments.device),
                        .cuda_device_max_connections = own_variable("CUDA_DEVICE_MAX_CONNECTIONS"),
                        .nccl_algo = own_variable("NCCL_ALGO")},
                       sink, std::move(found), parts);
  } catch (const UsageErrors& errors) {
    if (!line.worker) throw;
    std::vector<std::string> messages;
    for (const auto& message : errors.messages()) messages.push_back(with_roll_keys(message));
    throw UsageErrors(std::move(messages));
  }
  for (const auto& [severity, message] : told) sink(severity, message);
  const bool trains = parts.training && !arguments.skip_train;
  const auto devices = line.worker ? line.worker->device_mapping : std::vector<int64_t>();
  return {.arguments = std::move(arguments),
          .sharding = std::move(plan),
          .float8_modules = line.mindspeed ? line.mindspeed->float8 : Float8Modules{},
          .trains = trains,
          .device_mapping = devices};
}

void take_length_of_latents(Arguments& arguments) {
  if (arguments.seq_length || !arguments.hf_model) return;
  const auto config = read_hf_config(model_of_pipeline("--hf-model", *arguments.hf_model));
  std::array<int64_t, 3> sizes{1, 2, 2};  // Flux's and Qwen-Image's, whose files do not say it
  if (config && config->contains("patch_size") && config->at("patch_size").is_array())
    sizes = config->at("patch_size").get<std::array<int64_t, 3>>();
  if (config && config->contains("patch_size_t")) {  // HunyuanVideo and LTX-2 have two numbers
    const auto side = config->value("patch_size", int64_t{1});
    sizes = {config->value("patch_size_t", int64_t{1}), side, side};
  }
  int64_t most = 0;
  for (const auto* words : {&arguments.data_path, &arguments.train_data_path, &arguments.valid_data_path}) {
    for (const auto& prefix : parse_blend(*words).prefixes) {
      if (std::filesystem::exists(prefix + kLatentsFile)) most = std::max(most, LatentSet(prefix).most_patches(sizes));
    }
  }
  const int64_t multiple = arguments.sequence_multiple();
  if (most > 0) arguments.seq_length = (most + multiple - 1) / multiple * multiple;
}

RunPlan plan_run(CommandLine line, const RunParts& parts, const RendezvousOptions& ranks, const DiagnosticSink& sink) {
  Arguments& arguments = line.arguments;
  if (!parts.training) arguments = without_training_options(arguments);
  const bool applied = line.mistakes.attempt([&] {
    apply_files(line, parts, ranks.world_size, sink);
    if (arguments.use_checkpoint_args) take_checkpoint_arguments(arguments, sink);
    if (parts.data) take_length_of_latents(arguments);
  });
  const bool data_may_follow = !applied && (line.worker || line.mindspeed);
  if (parts.data && !parts.schedule && arguments.data_path.size() != 1 && !data_may_follow) {
    line.mistakes.add("inference reads one data set; give --data-path PREFIX of a .bin/.idx pair or of conversations.",
                      {"--data-path"});
  }
  if (!applied) line.mistakes.throw_if_any();  // without it much would seem to be missing
  RunPlan plan = validate_run(std::move(line), parts, ranks, sink);
  plan.hf_config = take_network_from_hf_model(plan.arguments, sink);
  return plan;
}

}  // namespace megashard
