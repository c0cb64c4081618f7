#include "framework/training_checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <cstring>

#include "checkpoint/checkpoint.h"
#include "framework/argument_table.h"
#include "framework/save_contract.h"

namespace megashard {
namespace {

Value to_value(const ArgumentValue& value) {
  return std::visit(
      [](const auto& each) -> Value {
        using T = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, std::vector<int64_t>> ||
                             std::is_same_v<T, std::vector<std::string>>) {
          List list;
          for (const auto& item : each) list.items.emplace_back(item);
          return list;
        } else {
          return each;
        }
      },
      value);
}

ArgumentValue to_argument(const Value& value) {
  if (const auto* flag = value.get_if<bool>()) return *flag;
  if (const auto* number = value.get_if<int64_t>()) return *number;
  if (const auto* number = value.get_if<double>()) return *number;
  if (const auto* text = value.get_if<std::string>()) return *text;
  return std::monostate{};
}

Dict to_dict(const std::vector<std::pair<std::string, ArgumentValue>>& values) {
  Dict dict;
  for (const auto& [name, value] : values) dict.set(name, to_value(value));
  return dict;
}

Value param_groups(const Optimizer& optimizer) {
  List groups;
  for (const auto& group : optimizer.param_groups()) {
    List names;
    for (const auto& name : group.params) names.items.emplace_back(name);
    Dict entry;
    entry.set("params", std::move(names));
    entry.set("lr", group.lr);
    entry.set("weight_decay", group.weight_decay);
    entry.set("wd_mult", group.wd_mult);
    if (optimizer.options().kind == OptimizerKind::kAdam) {
      entry.set("betas", Tuple{{optimizer.options().beta1, optimizer.options().beta2}});
      entry.set("eps", optimizer.options().eps);
    } else {
      entry.set("momentum", optimizer.options().momentum);
    }
    groups.items.emplace_back(std::move(entry));
  }
  return groups;
}

Bytes generator_state() {
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  return {std::string(static_cast<const char*>(state.const_data_ptr()), state.nbytes())};
}

void restore_generator(const Bytes& bytes) {
  at::Tensor state = at::empty({static_cast<int64_t>(bytes.data.size())}, at::kByte);
  std::memcpy(state.data_ptr(), bytes.data.data(), bytes.data.size());
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void reseed(const TrainingState& state, int rank) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(
      static_cast<uint64_t>(state.arguments.seed + 1000003 * state.iteration + 10007 * rank));
}

ShardedTensors tensors_of(const TrainingState& state, bool with_optimizer) {
  ShardedTensors tensors;
  for (auto& [name, tensor] : checked_state_dict(state.model)) {
    tensors.emplace_back("model." + name, std::move(tensor));
  }
  if (with_optimizer && state.optimizer != nullptr) {
    for (auto& entry : state.optimizer->sharded_state_dict()) tensors.push_back(std::move(entry));
  }
  return tensors;
}

}  // namespace

void save_training_checkpoint(const TrainingState& state, const ProcessGroupPtr& group,
                              const std::function<void(const std::string& line)>& notice,
                              AsyncSaver* saver) {
  const Arguments& arguments = state.arguments;
  Dict values;
  values.set("args", make_namespace(to_dict(argument_values(arguments))));
  values.set("checkpoint_version", 3.0);
  values.set("iteration", state.iteration);
  values.set("num_floating_point_operations_so_far", state.flops_so_far);
  if (!arguments.no_save_optim && state.optimizer != nullptr) {
    Dict optimizer;
    optimizer.set("param_groups", param_groups(*state.optimizer));
    values.set("optimizer", std::move(optimizer));
    values.set("opt_param_scheduler", to_dict(state.schedule->state_dict()));
  }
  if (!arguments.no_save_rng) {
    Dict mine;
    mine.set("torch_rng_state", generator_state());
    Dict ranks;
    ranks.set(std::to_string(group->rank()), std::move(mine));
    values.set("rng_state", std::move(ranks));
  }
  const SaveOptions options{.format = format_of_name(arguments.ckpt_format),
                            .retention = {.most_recent = arguments.most_recent_k,
                                          .interval = arguments.save_retain_interval},
                            .notice = notice,
                            .plans = state.save_plans};
  const auto tensors = tensors_of(state, !arguments.no_save_optim);
  const AsyncSaver::Write write = [directory = *arguments.save, iteration = state.iteration,
                                   values = std::move(values), options](
                                      const ShardedTensors& shards, const ProcessGroupPtr& ranks) {
    save_checkpoint(directory, iteration, shards, values, ranks, options);
  };
  if (saver == nullptr) return write(tensors, group);
  saver->start("iteration " + std::to_string(state.iteration), tensors, write);
}

LoadedTraining load_training_checkpoint(TrainingState& state, const CheckpointStep& step,
                                        const ProcessGroupPtr& group) {
  Arguments& arguments = state.arguments;
  const bool weights_only = step.is_release || arguments.finetune;
  const bool with_optimizer =
      !weights_only && !arguments.no_load_optim && state.optimizer != nullptr;
  const bool with_rng = !weights_only && !arguments.no_load_rng;
  LoadOptions options;
  options.wanted = [=](const std::string& key) {
    if (key.starts_with("optimizer.")) return with_optimizer;
    if (key.starts_with("rng_state.")) return with_rng;
    return !weights_only || key.starts_with("model.");
  };
  const c10::NoGradGuard no_grad;
  const auto loaded = load_checkpoint(step, tensors_of(state, with_optimizer), group, options);
  if (state.optimizer != nullptr && !with_optimizer) state.optimizer->reload_model_parameters();

  LoadedTraining result;
  if (weights_only) return result;
  state.iteration = loaded.values.at("iteration").as_int();
  if (const Value* flops = loaded.values.find("num_floating_point_operations_so_far")) {
    state.flops_so_far = flops->as_double();
  }
  if (const Value* saved = loaded.values.find("args")) {
    if (const Dict* fields = namespace_fields(*saved)) {
      if (const Value* samples = fields->find("consumed_train_samples"))
        arguments.consumed_train_samples = samples->as_int();
      if (const Value* samples = fields->find("consumed_valid_samples"))
        arguments.consumed_valid_samples = samples->as_int();
    }
  }
  if (const Value* schedule = loaded.values.find("opt_param_scheduler");
      with_optimizer && schedule != nullptr) {
    std::vector<std::pair<std::string, ArgumentValue>> entries;
    for (const auto& [name, value] : schedule->as_dict().entries)
      entries.emplace_back(name.as_string(), to_argument(value));
    state.schedule->load_state_dict(entries);
  }
  if (!with_rng) return result;
  const Value* ranks = loaded.values.find("rng_state");
  const Dict* by_rank = ranks == nullptr ? nullptr : ranks->get_if<Dict>();
  const Value* mine = by_rank == nullptr ? nullptr : by_rank->find(std::to_string(group->rank()));
  const bool same_world =
      by_rank != nullptr && by_rank->entries.size() == static_cast<size_t>(group->size());
  if (mine != nullptr && same_world) {
    restore_generator(*mine->as_dict().at("torch_rng_state").get_if<Bytes>());
  } else {
    reseed(state, group->rank());
    result.reseeded = true;
  }
  return result;
}

}  // namespace megashard
