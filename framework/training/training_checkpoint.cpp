#include "framework/training/training_checkpoint.h"

#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <filesystem>
#include <unordered_set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/state_dict_keys.h"
#include "framework/arguments/microbatches.h"
#include "framework/arguments/saved_arguments.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/load_strictness.h"
#include "framework/training/loaded_weights.h"
#include "framework/training/loss_scale.h"
#include "framework/training/random_states.h"
#include "parallel/collectives/agreement.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

Value param_groups(const Optimizer& optimizer) {
  List groups;
  for (const auto& group : optimizer.param_groups()) groups.items.emplace_back(optimizer.describe(group));
  return groups;
}

ShardedTensors tensors_of(const TrainingState& state, CheckpointFormat format, bool with_optimizer) {
  const bool is_dist = format == CheckpointFormat::kTorchDist;
  ShardedTensors tensors, saved = checked_state_dict(state.model);
  if (is_dist) saved = state.model.sharded_state_dict();  // by default what was checked, and free to differ from it
  for (auto& [name, tensor] : saved) tensors.emplace_back(model_key(name), std::move(tensor));
  if (with_optimizer && state.optimizer != nullptr) {
    for (auto& entry : state.optimizer->sharded_state_dict()) tensors.push_back(std::move(entry));
  }
  return tensors;
}

/// Each parameter once, in the order of PyTorch's model.parameters().
std::vector<std::string> parameter_names(const MegatronModule& model) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) names.push_back(item.key());
  }
  return names;
}

TiedKeys tied_keys(const MegatronModule& model) {
  TiedKeys keys;
  for (const auto& [name, first] : model.tied_names()) keys.emplace_back(model_key(name), model_key(first));
  return keys;
}

/// A weight's shard, and room for what the step holds under a further key of it.
struct FurtherKey {
  std::string key;
  at::Tensor shared;
  at::Tensor found;
};

/// Adds those of the tensors to them, so that one load reads all.
std::vector<FurtherKey> add_further_keys(ShardedTensors& tensors, const TiedKeys& tied) {
  std::vector<FurtherKey> further;
  for (const auto& [key, first] : tied) {
    const auto found =
        std::find_if(tensors.begin(), tensors.end(), [&](const auto& entry) { return entry.first == first; });
    if (found == tensors.end()) continue;
    ShardedTensor again = found->second;
    again.local = again.local.clone();
    further.push_back({key, found->second.local, again.local});
    tensors.emplace_back(key, std::move(again));
  }
  return further;
}

/// Throws where the step has other values under a further key of a weight: an untied model's.
/// `missing`: of all keys; what the step does not have counts as equal.
void check_tied(const std::vector<FurtherKey>& further, const std::vector<std::string>& missing,
                const std::string& folder) {
  for (const auto& [key, shared, found] : further) {
    const bool is_there = std::find(missing.begin(), missing.end(), key) == missing.end();
    TORCH_CHECK(
        !is_there || found.equal(shared), folder, " holds other values for ", key,
        " than for the weight that it shares here: its model was not tied; give "
        "--untie-embeddings-and-output-weights, with --hf-model \"tie_word_embeddings\": false in its config.json");
  }
}

/// What of a step is loaded besides the weights.
struct Parts {
  bool progress;  ///< iteration, samples, flops
  bool optimizer;
  bool random;
};

Parts parts_to_load(const TrainingState& state, const CheckpointStep& step, bool weights_only) {
  const Arguments& arguments = state.arguments;
  const bool goes_on = !step.is_release && !weights_only;
  return {.progress = goes_on,
          .optimizer = goes_on && !arguments.no_load_optim && state.optimizer != nullptr,
          .random = goes_on && !arguments.no_load_rng};
}

ArgumentRecord saved_arguments(const Dict& values) {
  const Value* args = values.find(kArgsKey);
  const Dict* fields = args == nullptr ? nullptr : namespace_fields(*args);
  return fields == nullptr ? ArgumentRecord{} : to_record(*fields);
}

/// Where the training stood.
struct Position {
  Progress progress{};
  int64_t world_size = 0;            ///< of the ranks that saved; 0: not said
  std::vector<std::string> lines{};  ///< what had to be derived
};

std::optional<int64_t> saved_count(const ArgumentRecord& saved, const char* name) {
  const auto* value = find_known(saved, name);
  const auto* count = value == nullptr ? nullptr : std::get_if<int64_t>(value);
  return count == nullptr ? std::nullopt : std::optional(*count);
}

Position saved_position(const Dict& values, const ArgumentRecord& saved, const CheckpointStep& step,
                        const Arguments& arguments) {
  Position position;
  const Value* iteration = values.find(kIterationKey);
  position.progress.step = iteration == nullptr ? step.iteration : iteration->as_int();
  if (const Value* flops = values.find(kFlopsKey)) position.progress.flops = flops->as_double();
  position.world_size = saved_count(saved, "world_size").value_or(0);
  if (const auto samples = saved_count(saved, kConsumedTrainSamples)) {
    position.progress.samples = *samples;
    position.progress.validation_samples = saved_count(saved, kConsumedValidSamples).value_or(0);
    return position;
  }
  position.progress.samples = samples_of_iterations(microbatch_options(arguments), position.progress.step);
  position.progress.validation_samples =
      position.progress.step / arguments.eval_interval * arguments.eval_iters * arguments.global_batch_size.value_or(1);
  position.lines.push_back(
      "the checkpoint does not say how many samples it has seen: " + std::to_string(position.progress.step) +
      " steps of these flags' batch are " + std::to_string(position.progress.samples));
  return position;
}

/// Takes the fp32 copies out of the missing names and returns whose they are: the weights, which
/// are there, hold all that is known of them.
std::unordered_set<std::string> take_missing_copies(LoadReport& report) {
  std::unordered_set<std::string> names;
  std::erase_if(report.missing, [&](const std::string& key) {
    auto parts = split_optimizer_state_key(key);
    if (!parts || parts->buffer != kFp32Buffer) return false;
    names.insert(std::move(parts->weight));
    return true;
  });
  return names;
}

void set_schedule(OptimizerParamScheduler& schedule, const Dict& values, const Position& position,
                  std::vector<std::string>& lines) {
  if (const Value* saved = values.find(kSchedulerKey)) {
    schedule.load_state_dict(to_record(saved->as_dict()));
    return;
  }
  schedule.advance(position.progress.samples);
  lines.push_back("the checkpoint has no schedule: it goes on from " + std::to_string(position.progress.samples) +
                  " samples");
}

/// The random states of `rank`. Ours are by rank; Megatron's are a list over ranks, or, where all
/// ranks draw alike, of one entry.
const Dict* states_of(const Dict& values, int rank) {
  const Value* ranks = values.find(kRngStateKey);
  if (ranks == nullptr) return nullptr;
  const auto of = [&](size_t number) -> const Dict* {
    const auto* list = ranks->get_if<List>();
    const auto* by_name = ranks->get_if<Dict>();
    const Value* found = by_name == nullptr ? nullptr : by_name->find(std::to_string(number));
    if (list != nullptr && number < list->items.size()) found = &list->items[number];
    return found == nullptr ? nullptr : found->get_if<Dict>();
  };
  const Dict* mine = of(static_cast<size_t>(rank));
  return mine == nullptr ? of(0) : mine;
}

/// What a step of `group`'s ranks holds besides tensors.
Dict values_of(const TrainingState& state, const ProcessGroupPtr& group) {
  const Arguments& arguments = state.arguments;
  Dict values;
  values.set(kArgsKey, make_namespace(to_dict(recorded_arguments(arguments, state.progress))));
  values.set(kCheckpointVersionKey, kCheckpointVersion);
  values.set(kIterationKey, state.progress.step);
  values.set(kFlopsKey, state.progress.flops);
  if (!arguments.no_save_optim && state.optimizer != nullptr) {
    Dict optimizer;
    optimizer.set(kParamGroupsKey, param_groups(*state.optimizer));
    save_loss_scale(state.scaler, optimizer);
    values.set(kOptimizerKey, std::move(optimizer));
    values.set(kSchedulerKey, to_dict(state.schedule->state_dict()));
  }
  if (!arguments.no_save_rng) {
    Dict ranks;
    ranks.set(std::to_string(group->rank()), random_states(state.device));
    values.set(kRngStateKey, std::move(ranks));
  }
  return values;
}

void restore_random(const TrainingState& state, const Dict& values, const Position& position,
                    const ProcessGroupPtr& group, std::vector<std::string>& lines) {
  const Dict* mine = states_of(values, group->rank());
  const bool same_world = position.world_size == group->size();
  if (same_world && mine != nullptr && restore_random_states(*mine, state.device)) return;
  seed_random_states(
      static_cast<uint64_t>(state.arguments.seed + 1000003 * state.progress.step + 10007 * group->rank()),
      state.device);
  std::string why = "the checkpoint has no random states for these devices";
  if (mine != nullptr && position.world_size == 0) {
    why = "the checkpoint does not say how many ranks saved its random states";
  } else if (!same_world && position.world_size != 0) {
    why = "the checkpoint was saved by " + std::to_string(position.world_size) + " ranks, and there are " +
          std::to_string(group->size());
  }
  lines.push_back(why + ": dropout goes on from seed, iteration and rank");
}

}  // namespace

bool saves_where_it_loads(const TrainingState& state) {
  const auto& save = state.arguments.save;
  const auto& load = state.loaded_from ? state.loaded_from : state.arguments.load;
  std::error_code error;  // of a folder that is not there
  return save && load && std::filesystem::equivalent(*save, *load, error);
}

std::string check_save_format(const TrainingState& state) {
  const auto format = state.arguments.ckpt_format;
  const auto tensors = tensors_of(state, format, /*with_optimizer=*/false);
  return format == CheckpointFormat::kTorchDist ? check_torch_dist_shards(tensors) : "";
}

int64_t least_step_bytes(const TrainingState& state) {
  int64_t bytes = 0;
  for (const auto& [key, tensor] : tensors_of(state, state.arguments.ckpt_format, !state.arguments.no_save_optim))
    bytes += c10::multiply_integers(tensor.global_sizes) * static_cast<int64_t>(tensor.local.element_size());
  return bytes;
}

void save_training_checkpoint(const TrainingState& state, const ProcessGroupPtr& group,
                              const std::function<void(const std::string& line)>& notice, AsyncSaver* saver) {
  const Arguments& arguments = state.arguments;
  Dict values;
  ShardedTensors tensors;
  all_or_throw(group, [&] {
    values = values_of(state, group);
    tensors = tensors_of(state, arguments.ckpt_format, !arguments.no_save_optim);
  });
  SaveOptions options{.format = arguments.ckpt_format,
                      .retention = {.most_recent = arguments.most_recent_k,
                                    .interval = arguments.save_retain_interval,
                                    .damaged = state.damaged_steps,
                                    .other_runs = state.replaces_other_runs},
                      .run = state.run,
                      .notice = notice,
                      .tied = tied_keys(state.model),
                      .bare_names = arguments.ckpt_bare_names,
                      .plans = state.save_plans};
  const auto noticed = std::make_shared<std::vector<std::string>>();
  if (saver != nullptr) options.notice = [noticed](const std::string& line) { noticed->push_back(line); };
  const AsyncSaver::Write write = [directory = *arguments.save, iteration = state.progress.step,
                                   values = std::move(values),
                                   options](const ShardedTensors& shards, const ProcessGroupPtr& ranks) {
    save_checkpoint(directory, iteration, shards, values, ranks, options);
  };
  if (saver == nullptr) return write(tensors, group);
  saver->start("iteration " + std::to_string(state.progress.step), tensors, write, [noticed, notice] {
    for (const auto& line : *noticed) notice(line);
  });
}

std::vector<std::string> load_training_checkpoint(TrainingState& state, const CheckpointStep& step,
                                                  const ProcessGroupPtr& group, bool weights_only) {
  const Arguments& arguments = state.arguments;
  const Parts parts = parts_to_load(state, step, weights_only);
  const std::string random_states = std::string(kRngStateKey) + ".";
  const std::string param_groups_key = std::string(kOptimizerPrefix) + kParamGroupsKey;
  const std::string schedule_key = std::string(kSchedulerKey) + ".";
  const std::string my_random_states = random_states + std::to_string(group->rank()) + ".";
  std::vector<std::string> lines;
  std::unordered_set<std::string> stale_copies;
  Position position;
  std::optional<OptimizerParamScheduler> schedule;
  std::optional<GradScaler::State> scale;

  LoadOptions options;
  if (!arguments.auto_detect_ckpt_format) options.format = arguments.ckpt_format;
  options.strict = false;
  const auto weights = state.model.weight_map();
  options.other_forms = [&](const std::string& key, const ShardedTensor& tensor) {
    return other_forms(weights, key, tensor);
  };
  options.other_names = names_in_forms(weights);
  if (parts.optimizer) options.parameters = parameter_names(state.model);
  ShardedTensors tensors;
  std::vector<FurtherKey> further;
  const auto is_further = [&](const std::string& key) {
    return std::any_of(further.begin(), further.end(), [&](const auto& each) { return each.key == key; });
  };
  options.wanted = [&](const std::string& key) {
    if (is_model_key(key) || key == kArgsKey) return true;
    if (key.starts_with(param_groups_key)) return false;  // the flags and the schedule set them
    if (is_optimizer_key(key) || key.starts_with(schedule_key)) return parts.optimizer;
    if (key.starts_with(random_states)) {  // a value a rank, or one for each of its states
      const auto rank = key + ".";
      return parts.random && (rank.starts_with(my_random_states) || rank.starts_with(random_states + "0."));
    }
    return parts.progress;
  };
  options.accept = [&](const Dict& values, LoadReport report) {
    const ArgumentRecord saved = saved_arguments(values);
    if (const auto told = report.names.told(); !told.empty()) lines.push_back(told);
    if (parts.progress) {
      check_checkpoint_arguments(arguments, saved, step.folder);
      position = saved_position(values, saved, step, arguments);
      const Microbatches batches(microbatch_options(arguments), position.progress.samples);
      lines.insert(lines.end(), position.lines.begin(), position.lines.end());
    }
    if (parts.optimizer) {
      set_schedule(schedule.emplace(*state.schedule), values, position, lines);
      scale = loss_scale_to_load(state.scaler, values.find(kOptimizerKey), lines);
    }
    const bool has_schedule = parts.optimizer && values.find(kSchedulerKey) != nullptr;
    const bool takes_schedule = has_schedule && arguments.use_checkpoint_opt_param_scheduler;
    if (const auto changed = changed_arguments(arguments, saved, takes_schedule); !changed.empty())
      lines.push_back("the flags of this run count where the checkpoint's differ: " + changed);
    stale_copies = take_missing_copies(report);
    std::erase_if(report.missing, is_further);
    const auto differences = judge_differences(report, load_strictness(arguments.dist_ckpt_strictness), step.folder);
    lines.insert(lines.end(), differences.begin(), differences.end());
  };
  const c10::NoGradGuard no_grad;
  all_or_throw(group, [&] {
    tensors = tensors_of(state, options.format ? *options.format : detect_format(step.folder), parts.optimizer);
    further = add_further_keys(tensors, tied_keys(state.model));
  });
  const auto loaded = load_checkpoint(step, tensors, group, options);
  all_or_throw(group, [&] { check_tied(further, loaded.report.missing, step.folder); });
  if (arguments.downcast_to_bf16) round_weights_to_bf16(state.model);
  if (state.optimizer != nullptr) {
    state.optimizer->reload_model_parameters(
        [&](const std::string& name) { return !parts.optimizer || stale_copies.count(name) != 0; });
  }
  state.loaded_from = std::filesystem::path(step.folder).parent_path().string();
  if (parts.progress && saves_where_it_loads(state)) state.damaged_steps = step.passed_over;
  if (!parts.progress) return lines;

  state.progress = position.progress;
  if (schedule) *state.schedule = *schedule;
  if (scale) state.scaler->load_state(*scale);
  if (parts.random) {
    all_or_throw(group, [&] { restore_random(state, loaded.values, position, group, lines); });
  }
  return lines;
}

bool may_lack_weights(const Arguments& arguments) {
  return load_strictness(arguments.dist_ckpt_strictness).missing != LoadStrictness::Handling::kRefuse;
}

}  // namespace megashard
