#include "launch/train/session.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/folder_content.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/values/gather_values.h"
#include "framework/arguments/argument_value.h"
#include "framework/data/data_formats.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/freeze.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/modules/wrap_policy.h"
#include "framework/training/loaded_weights.h"
#include "framework/training/random_states.h"
#include "framework/training/training_checkpoint.h"
#include "framework/training/training_log.h"
#include "launch/arguments/model_folder.h"
#include "launch/arguments/plugins.h"
#include "launch/output/status_line.h"
#include "models/float8/float8_layers.h"
#include "models/hugging_face/load_hf_weights.h"
#include "models/lora/lora.h"
#include "models/register_models.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/collectives/rendezvous.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {
namespace {

void check_versions(const std::string& flag, const ModelPlugin* plugin) {
  const ModelPlugin own;
  const std::string remedy = "; build it again against the installed headers.";
  if (plugin == nullptr || plugin->version != own.version) {
    throw UsageError(flag + " was built against another megashard: its interface is " +
                     std::to_string(plugin == nullptr ? 0 : plugin->version) + ", this program's " +
                     std::to_string(own.version) + remedy);
  }
  if (std::string(plugin->libtorch) != own.libtorch) {
    throw UsageError(flag + " was built against LibTorch " + plugin->libtorch + ", this program runs on " +
                     own.libtorch + remedy);
  }
  const bool same = plugin->batch_bytes == own.batch_bytes && plugin->model_bytes == own.model_bytes &&
                    plugin->mixin_bytes == own.mixin_bytes;
  if (!same) throw UsageError(flag + " was built against another megashard" + remedy);
  if (plugin->add_models == nullptr) throw UsageError(flag + " registers no model: its ModelPlugin has no add_models.");
}

/// Loads the library of --model-plugin (framework/modules/model_plugin.h), which adds its models to the registry and
/// stays loaded. Throws UsageError if the file cannot be loaded, is not a plugin, was built against another megashard
/// or LibTorch, or if its registration throws.
void load_model_plugin(const std::string& path, ModelRegistry& registry) {
  const std::string flag = "--model-plugin " + path;
  if (!std::filesystem::is_regular_file(path))
    throw UsageError(flag + " is no file; give the path of a shared library.");
  if (const auto why = why_no_shared_library(path); !why.empty())
    throw UsageError(flag + " cannot be loaded: " + why + ".");
  // Absolute, because dlopen searches system folders for names without a slash.
  const int64_t ignored = ignored_data_formats();
  void* library = dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw UsageError(flag + " cannot be loaded: " + why +
                     "; it must be a shared library that was built against this megashard and its "
                     "LibTorch.");
  }
  void* symbol = dlsym(library, kModelPluginSymbol);
  if (symbol == nullptr) {
    throw UsageError(flag + " is no plugin: it does not export " + kModelPluginSymbol + "(); see docs/user_models.md.");
  }
  require(ignored_data_formats() == ignored,
          flag + " was built against another megashard or LibTorch; build it again against the installed headers.");
  try {
    const auto* plugin = reinterpret_cast<const ModelPlugin* (*)()>(symbol)();
    check_versions(flag, plugin);
    plugin->add_models(registry);
  } catch (const UsageError&) {
    throw;
  } catch (const c10::Error& error) {
    throw UsageError(flag + " failed to register its models: " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw UsageError(flag + " failed to register its models: " + error.what());
  }
}

constexpr const char* kLoadFlag = "--load";

/// Reason why --load without a checkpoint is not a new run; empty if it is. For the first rank.
std::string start_refusal(const RunPlan& plan, const std::string& folder, const std::string& tracker,
                          const std::string& key) {
  using Kind = FolderContent::Kind;
  const Arguments& arguments = plan.arguments;
  const auto told = key + " " + folder + ": ";
  const auto content = misplaced_checkpoint(folder);
  const auto place = (std::filesystem::path(folder) / content.name).parent_path().string();
  switch (content.kind) {
    case Kind::kWeights:
      return told + "it holds weights (" + content.name +
             "), and no checkpoint of a training; give them by --hf-model, or convert them first (megashard convert)";
    case Kind::kStep:
      return told + "there is neither a tracker file nor a folder iter_0000010 in it, but " + place +
             " looks like a step (" + content.name.substr(content.name.rfind('/') + 1) +
             "): move it to DIR/iter_0000010, with the iteration that it is of, and give that as --load";
    case Kind::kRun:
      return told + "there is no checkpoint in it, but there are some in " + place + "; give that";
    case Kind::kNothing:
      break;
  }
  if (path_exists(folder) && !is_directory(folder)) return told + "it is a file; give the folder of a checkpoint";
  const auto missing = tracker + " does not exist, so there is nothing to load";
  if (arguments.ckpt_convert_format) return "--ckpt-convert-format: " + missing;
  if (arguments.exit_on_missing_checkpoint) return "--exit-on-missing-checkpoint: " + missing;
  if (!plan.trains)
    return told + missing + ", and nothing is trained: give the folder of the checkpoint, or leave --load out";
  if (key != kLoadFlag) return told + missing + "; give the folder of the checkpoint, or false to start anew";
  return "";
}

/// Handles --load without a checkpoint: throws if only its weights can be meant. Collective.
void go_on_without_checkpoint(const RunPlan& plan, const std::string& folder, const ProcessGroupPtr& group,
                              const DiagnosticSink& sink) {
  const Arguments& arguments = plan.arguments;
  const auto tracker = (std::filesystem::path(folder) / "latest_checkpointed_iteration.txt").string();
  const bool is_of_file = arguments.resume_key && !arguments.is_given("load");
  const std::string key = is_of_file ? *arguments.resume_key : kLoadFlag;
  const auto refusal =
      first_rank_value(group, [&]() -> Value { return start_refusal(plan, folder, tracker, key); }).as_string();
  require(refusal.empty(), refusal);
  const bool has_files = arguments.hf_model && !arguments.from_scratch;
  const auto weights = arguments.pretrained_checkpoint
                           ? "--pretrained-checkpoint " + *arguments.pretrained_checkpoint
                           : (has_files ? "--hf-model " + *arguments.hf_model : std::string());
  sink(Severity::kNotice, missing_checkpoint_lines(tracker, weights));
}

/// As find_step, for a folder from the user: errors of the path become UsageErrors.
std::optional<CheckpointStep> find_given_step(const std::string& folder, const ProcessGroupPtr& group,
                                              const FindOptions& find) {
  std::optional<CheckpointStep> step;
  value_errors_are_mistakes([&] { step = find_step(folder, group, find); });
  return step;
}

at::ScalarType stored_dtype(const Arguments& arguments) { return *parse_dtype(arguments.params_dtype); }

/// Translates prefixes: ROLL's other engine names the tower of a vision-language model vision_model.
std::vector<std::string> our_prefixes(std::vector<std::string> prefixes, const torch::nn::Module& model,
                                      const DiagnosticSink& sink) {
  constexpr std::string_view kTheirs = "vision_model", kOurs = "model.visual";
  const auto parameters = model.named_parameters();
  const auto begins = [&](std::string_view prefix) {
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const auto& item) { return item.key().starts_with(prefix); });
  };
  for (auto& prefix : prefixes) {
    if (!prefix.starts_with(kTheirs) || begins(kTheirs) || !begins(kOurs)) continue;
    prefix.replace(0, kTheirs.size(), kOurs);
    sink(Severity::kNotice, "--freeze-module-prefix: vision_model is model.visual in this model");
  }
  return prefixes;
}

}  // namespace

DiagnosticSink sink_for(int rank, std::optional<int64_t> logging_level) {
  return [rank, least = logging_level.value_or(0)](Severity severity, const std::string& message) {
    constexpr int64_t kInfo = 20, kWarning = 30;  // levels of Python's logging
    const bool is_warning = severity == Severity::kWarning;
    if (rank == 0 && least <= (is_warning ? kWarning : kInfo))
      print_over_status((is_warning ? "WARNING: " : "") + message);
  };
}

RendezvousOptions ranks_of_launcher(const Arguments& arguments) {
  return read_environment(arguments.local_rank, arguments.distributed_init_method.value_or("env://")).rendezvous;
}

ProcessGroupPtr join_world(const RunPlan& plan, RendezvousOptions options) {
  options.backend = *plan.arguments.distributed_backend;
  options.timeout = std::chrono::minutes(plan.arguments.distributed_timeout_minutes);
  if (!plan.device_mapping.empty())
    options.local_rank = static_cast<int>(plan.device_mapping.at(static_cast<size_t>(options.rank)));
  return join_world(std::move(options));
}

ProcessGroupPtr join_world(RendezvousOptions options) {
  // the first rank of each host prints
  if (options.local_rank <= 0 || options.local_world_size == 0) options.notice = print_over_status;
  options.long_wait = [](const std::string& line) {
    const std::string text = "megashard: " + line + "\n";
    std::fwrite(text.data(), 1, text.size(), stderr);
  };
  ProcessGroupPtr group;
  value_errors_are_mistakes([&] { group = init_process_group(options); });
  return group;
}

c10::Device device_of(const ProcessGroupPtr& group) {
  return DeviceMesh(std::vector<ProcessGroupPtr>{group}, {}).device();
}

void seed_generators(const Arguments& arguments, int rank, c10::Device device) {
  const int64_t alike = arguments.tensor_model_parallel_size * arguments.context_parallel_size;
  const int64_t apart = 10 * (rank / alike);  // by data parallel rank, as in Megatron
  const int64_t seed = arguments.seed + (arguments.data_parallel_random_init ? apart : 0);
  seed_random_states(static_cast<uint64_t>(seed), device);
}

Start find_start(const RunPlan& plan, const ProcessGroupPtr& group, const DiagnosticSink& sink) {
  const Arguments& arguments = plan.arguments;
  enter_phase("search for the step to load");
  const FindOptions find{.ckpt_step = arguments.ckpt_step,
                         .depth = arguments.verify_checkpoint ? VerifyDepth::kBytes : VerifyDepth::kSizes,
                         .notice = [&sink](const std::string& line) { sink(Severity::kWarning, line); }};
  const auto resolved = [&](std::optional<std::string> folder) {
    if (!folder) return folder;
    value_errors_are_mistakes(
        [&] { folder = first_rank_value(group, [&]() -> Value { return resolve_best_step(*folder); }).as_string(); });
    return folder;
  };
  const auto load = resolved(arguments.load), pretrained = resolved(arguments.pretrained_checkpoint);
  const auto from_step = [&](const CheckpointStep& step, bool weights_only) {
    return Start{WeightSource::kCheckpoint, step, weights_only, may_lack_weights(arguments)};
  };
  if (load) {
    if (const auto step = find_given_step(*load, group, find)) return from_step(*step, arguments.finetune);
    go_on_without_checkpoint(plan, *load, group, sink);
  }
  if (pretrained) {
    const auto step = find_given_step(*pretrained, group, find);
    if (!step) {
      throw UsageError("--pretrained-checkpoint " + *pretrained +
                       " holds no checkpoint (no latest_checkpointed_iteration.txt); check the "
                       "path, or leave it out");
    }
    return from_step(*step, /*weights_only=*/true);
  }
  if (arguments.hf_model && !arguments.from_scratch) return {WeightSource::kHuggingFace};
  if (!arguments.perform_initialization && !arguments.init_model_with_meta_device) {
    sink(Severity::kWarning, "--no-initialization: no weights are loaded either, so training starts from whatever the "
                             "layers' constructors left; give --load or --hf-model, or leave it out");
  }
  return {.source = WeightSource::kInitialisation, .initialises = true};
}

BuiltModel build_model(const RunPlan& plan, bool initialises) {
  const Arguments& arguments = plan.arguments;
  ModelRegistry registry;
  register_models(registry);
  if (arguments.model_plugin) load_model_plugin(*arguments.model_plugin, registry);
  const auto make = [&] {
    std::shared_ptr<MultiModalModule> model;
    const auto* config = plan.hf_config ? &*plan.hf_config : nullptr;
    value_errors_are_mistakes([&] { model = registry.create(arguments, arguments.model.value_or(""), config); });
    auto* init = dynamic_cast<WeightInitMixin*>(model.get());
    // With the meta device --no-initialization only means not to initialise twice (MindSpeed-MM).
    const bool draws = arguments.perform_initialization || arguments.init_model_with_meta_device;
    if (initialises && draws && init != nullptr) init->init_weights();
    Float8Modules modules = plan.float8_modules;
    if (arguments.first_last_layers_bf16) {
      modules.first = arguments.num_layers_at_start_in_bf16;
      modules.last = arguments.num_layers_at_end_in_bf16;
    }
    if (arguments.fp4_format) use_float4(*model, modules);
    if (arguments.fp8_format) {
      use_float8(
          *model,
          {.recipe = arguments.fp8_recipe == Fp8Recipe::kMxfp8 ? Float8Recipe::kMxfp8 : Float8Recipe::kTensorwise,
           .gradient_format = arguments.fp8_format == Fp8Format::kHybrid ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn},
          modules);
    }
    if (arguments.lora_r) {
      add_lora(*model, {.rank = *arguments.lora_r,
                        .alpha = arguments.lora_alpha,
                        .dropout = arguments.lora_dropout,
                        .target_modules = arguments.lora_target_modules});
    }
    if (const auto dtype = stored_dtype(arguments); dtype != at::kFloat) {
      auto* mixin = dynamic_cast<FSDP2Mixin*>(model.get());
      mixin == nullptr ? model->to(dtype) : mixin->store_in(dtype);
    }
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
  const auto prefixes = our_prefixes(arguments.freeze_module_prefix, *built.model, sink);
  const int64_t frozen =
      freeze_parameters(*built.model, prefixes) + freeze_modules(*built.model, arguments.freeze_modules);
  if (frozen == 0) return;
  auto names = prefixes;
  names.insert(names.end(), arguments.freeze_modules.begin(), arguments.freeze_modules.end());
  sink(Severity::kNotice, c10::str("frozen: ", frozen, " elements of ", c10::Join(", ", names)));
}

void load_first_weights(const Arguments& arguments, const BuiltModel& built, const ProcessGroupPtr& group,
                        const DiagnosticSink& sink) {
  all_or_rethrow(group, [&] { load_hf_weights(*built.model, *arguments.hf_model, sink); });
  if (arguments.downcast_to_bf16) round_weights_to_bf16(*built.model);
}

at::ScalarType shard_model(const RunPlan& plan, const BuiltModel& built, const ParallelGroups& groups, bool initialises,
                           const DiagnosticSink& sink) {
  const Arguments& arguments = plan.arguments;
  const ShardingPlan& sharding = plan.sharding;
  auto* mixin = dynamic_cast<FSDP2Mixin*>(built.model.get());
  TORCH_CHECK(mixin != nullptr, "the model ", built.model->class_name(),
              " does not derive from FSDP2Mixin, so it cannot be sharded");
  ActivationPlan activations = activation_plan(arguments);
  activations.recompute_reentrant = sharding.recompute_reentrant;
  activations.recompute_towers = sharding.recompute_towers;
  const bool has_plan = arguments.fsdp2_plan != "auto" && arguments.fsdp2_plan != "off";
  mixin->fully_shard({.process_group = groups.sharding,
                      .tensor_parallel_group = groups.tensor_parallel,
                      .config = sharding.config,
                      .strictness = sharding.strictness,
                      .sink = sink,
                      .activations = activations,
                      .unit_plan = has_plan ? std::optional(load_unit_plan(arguments.fsdp2_plan)) : std::nullopt,
                      .init_tape = built.tape.get(),
                      .weights_follow = !initialises && !arguments.lora_r,
                      .unset_weights_follow = arguments.lora_r.has_value(),
                      .trains = plan.trains});
  return sharding.config.mixed_precision.param_dtype.value_or(stored_dtype(arguments));
}

Session open_session(const RunPlan& plan, const ProcessGroupPtr& world, const DiagnosticSink& sink,
                     const SessionHooks& hooks) {
  const Arguments& arguments = plan.arguments;
  const ParallelGroups groups(arguments, world);
  seed_generators(arguments, world->rank(), device_of(world));
  if (hooks.generators_seeded) hooks.generators_seeded();
  const Start from = find_start(plan, world, sink);
  Session session = build_session(plan, groups, from, sink, hooks);
  if (from.source == WeightSource::kHuggingFace || arguments.lora_r)
    load_first_weights(arguments, session.built, world, sink);
  return session;
}

std::optional<Session> open_reference(const RunPlan& plan, const ParallelGroups& groups, const DiagnosticSink& sink) {
  if (!plan.arguments.ref_model) return std::nullopt;
  RunPlan own = plan;
  Arguments& arguments = own.arguments;
  require_model_folder("--ref-model", *arguments.ref_model);
  arguments.hf_model = arguments.ref_model;
  arguments.params_dtype = choice_name("ref_model_dtype", arguments.ref_model_dtype);
  arguments.lora_r.reset();
  arguments.fp8_format.reset();
  arguments.fp4_format.reset();
  arguments.first_last_layers_bf16 = false;
  own.trains = false;
  own.sharding.config.mixed_precision = {};
  own.sharding.config.fp8_all_gather.reset();
  own.sharding.config.offload_to_cpu = !device_of(groups.world).is_cpu();
  Session session = build_session(own, groups, {WeightSource::kHuggingFace}, sink);
  load_first_weights(arguments, session.built, groups.world, sink);
  sink(Severity::kNotice, "the reference is " + *arguments.ref_model + ", in " + arguments.params_dtype);
  return session;
}

Session build_session(const RunPlan& plan, const ParallelGroups& groups, const Start& from, const DiagnosticSink& sink,
                      const SessionHooks& hooks) {
  BuiltModel built = build_model(plan, from.initialises);
  freeze_model(plan.arguments, built, sink);
  if (hooks.model_built) hooks.model_built(*built.model);
  const at::ScalarType computed_in = shard_model(plan, built, groups, from.initialises, sink);
  return {groups, device_of(groups.world), from, std::move(built), computed_in};
}

}  // namespace megashard
