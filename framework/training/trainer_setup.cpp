// A trainer's parts, and what it does before its first step.
#include <algorithm>
#include <filesystem>
#include <iterator>

#include "framework/callbacks/callbacks.h"
#include "framework/training/loss_scale.h"
#include "framework/training/metrics_file.h"
#include "framework/training/output_paths.h"
#include "framework/training/parallel_groups.h"
#include "framework/training/run_listeners.h"
#include "framework/training/trainer.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

NamedTensors named_parameters(const torch::nn::Module& model) {
  NamedTensors named;
  for (const auto& item : model.named_parameters()) named.emplace_back(item.key(), item.value());
  return named;
}

/// Throws for an override that is for no parameter of any rank. Collective.
void check_overrides(const std::vector<ParamGroupOverride>& overrides, const Optimizer& optimizer,
                     const ProcessGroupPtr& group) {
  if (overrides.empty()) return;
  const auto of_ranks = gather_or_throw(group, [&] {
    std::string matched(overrides.size(), '0');
    for (const auto& of_group : optimizer.param_groups()) {
      for (const auto& name : of_group.params) {
        for (size_t i = 0; i < overrides.size(); ++i) matched[i] = overrides[i].matches(name) ? '1' : matched[i];
      }
    }
    return matched;
  });
  for (size_t i = 0; i < overrides.size(); ++i) {
    const bool is_for_some =
        std::ranges::any_of(of_ranks, [&](const std::string& matched) { return matched[i] == '1'; });
    require(is_for_some, "no parameter that is trained has a name like \"" + overrides[i].pattern +
                             "\", for which --param-group-overrides, --lr-scale-modules or "
                             "--weight-decay-exclude-modules has settings");
  }
}

DataOptions with_group(DataOptions data, int64_t rows) {
  data.group = rows;
  return data;
}

bool has_replicas(const torch::nn::Module& model) {
  for (const auto& parameter : model.parameters()) {
    const auto view = reshard_and_view(parameter);
    const bool has_several_dims = !view.is_replicated() && view.mesh->ndim() > 1;
    if (has_several_dims && view.placements[0] == Placement::replicate() && view.mesh->size(0) > 1) return true;
  }
  return false;
}

}  // namespace

Trainer::Trainer(const Arguments& arguments, MultiModalModule& model, const ParallelGroups& groups, c10::Device device,
                 const DataOptions& data, TrainerCallbacks callbacks)
    : arguments_(arguments),
      model_(model),
      group_(groups.world),
      sharding_(groups.sharding),
      device_(device),
      callbacks_(std::move(callbacks)),
      optimizer_(make_optimizer(named_parameters(model), optimizer_options(arguments, model))),
      schedule_(scheduler_options(arguments)),
      scaler_(make_scaler(arguments, optimizer_->parameters())),
      timers_(
          arguments.timing_log_level == 0
              ? nullptr
              : std::make_unique<StepTimers>(arguments.timing_log_level, arguments.timing_log_option, group_, device_)),
      objective_(make_objective(arguments.objective, arguments.objective_options)),
      step_(model, *objective_, *optimizer_, sharding_, device_,
            {.clip_grad = arguments.clip_grad,
             .needs_finite_gradients = arguments.check_for_nan_in_loss_and_grad,
             .calculate_per_token_loss = arguments.calculate_per_token_loss,
             .has_replicas = has_replicas(model),
             .reduces_each_microbatch = arguments.reduce_scatter_during_grad_accumulation,
             .empty_unused_memory_level = arguments.empty_unused_memory_level,
             .timers = timers_.get(),
             .scaler = scaler_.get(),
             .sequence = sequence_ranks(arguments, model, sharding_)}),
      state_{arguments, model, optimizer_.get(), &schedule_, device_},
      order_(model, group_),
      data_(arguments, with_group(data, objective_->rows_per_term()), sharding_->rank(), device_),
      search_(model, step_, data_, group_),
      reader_(arguments, group_, device_, scaler_ != nullptr, callbacks_.sink,
              [this](const std::string& what, StepReader::NotFinite which, const std::string& remedy) {
                search_.fail(what, which, remedy, batches_, state_.progress);
              }),
      evaluation_(arguments.eval_iters, model, step_, data_, reader_, group_, device_, timers_.get(), callbacks_,
                  [this] { return host_stats(0, {}); }),
      saver_(std::make_shared<CheckpointSaver>(
          state_, group_, callbacks_.print_on_first_rank,
          [sink = callbacks_.sink](const std::string& line) {
            if (sink) sink(Severity::kWarning, line);
          },
          [this](const std::string& why) { events_.save_failed(why, state_.progress.step); })) {
  state_.scaler = scaler_.get();
  require(*arguments.micro_batch_size % objective_->rows_per_term() == 0,
          c10::str("--objective ", arguments.objective, " compares ", objective_->rows_per_term(),
                   " neighbouring samples; give --micro-batch-size a multiple of it."));
  check_overrides(param_group_overrides(arguments), *optimizer_, group_);
  if (arguments.hf_model && !arguments.from_scratch) search_.note_loaded(*arguments.hf_model);
  add_listeners();
}

void Trainer::add_listeners() {
  const bool is_first_rank = group_->rank() == 0;
  const PrintLine& print = callbacks_.print_on_first_rank;
  listeners_ = callbacks_.listeners;
  listeners_.push_back(std::make_shared<DueSteps>(arguments_, is_first_rank, callbacks_.program_start));
  std::shared_ptr<MemoryLog> memory;
  if (arguments_.log_memory && is_first_rank) {
    memory = std::make_shared<MemoryLog>(
        model_, *optimizer_, device_,
        MemoryLog::Sources{.live_bytes = callbacks_.live_memory_bytes, .peak_bytes = callbacks_.peak_memory_bytes});
    listeners_.push_back(std::make_shared<MemoryLines>(memory, events_, print));
  }
  if (arguments_.profile && std::ranges::count(arguments_.profile_ranks, group_->rank()) > 0)
    listeners_.push_back(std::make_shared<Profiler>(arguments_, *group_, device_, memory, events_, print));
  listeners_.push_back(std::make_shared<LogLines>(timers_.get(), print));
  metrics_files_ = std::make_shared<MetricsFiles>(arguments_, callbacks_.sink);
  listeners_.push_back(metrics_files_);
  std::ranges::copy(make_callbacks(arguments_.callback, arguments_.callback_options), std::back_inserter(listeners_));
  listeners_.push_back(saver_);
}

void Trainer::load(const CheckpointStep& step, bool weights_only) {
  enter_phase("load of step", step.iteration);
  const std::string folder = std::filesystem::path(step.folder).parent_path().string();
  callbacks_.print_on_first_rank(loading_line(folder, step.is_release ? std::nullopt : std::optional(step.iteration)));
  const auto lines = load_training_checkpoint(state_, step, group_, weights_only);
  search_.note_loaded(step.folder + (arguments_.lora_r ? " and " + *arguments_.hf_model : ""));
  if (!step.is_release && !weights_only) saver_->note_loaded(step);
  callbacks_.print_on_first_rank(loaded_line(folder, state_.progress.step));
  for (const auto& line : lines) callbacks_.print_on_first_rank(line);
}

void Trainer::convert_checkpoint() {
  const std::string loaded = arguments_.auto_detect_ckpt_format ? "checkpoint" : format_name(arguments_.ckpt_format);
  Arguments to = arguments_;
  to.ckpt_format = *arguments_.ckpt_convert_format;
  const std::string converted = format_name(to.ckpt_format);
  to.save = *arguments_.ckpt_convert_save + "/" + converted;
  TrainingState state{.arguments = to,
                      .model = model_,
                      .optimizer = optimizer_.get(),
                      .schedule = &schedule_,
                      .device = device_,
                      .progress = state_.progress,
                      .loaded_from = state_.loaded_from,
                      .damaged_steps = state_.damaged_steps,
                      .scaler = scaler_.get()};
  CheckpointSaver saver(state, group_, callbacks_.print_on_first_rank, [this](const std::string& line) {
    if (callbacks_.sink) callbacks_.sink(Severity::kWarning, line);
  });
  if (saver_->loaded()) saver.note_loaded(*saver_->loaded());
  saver.check();
  try_output_paths(output_paths(to, /*saves=*/false), group_);
  saver.begin_run(/*converts=*/true);
  saver.save();
  saver.check_last();
  callbacks_.print_on_first_rank("> converted checkpoint: " + loaded + " -> " + converted + ".");
}

void Trainer::open_metrics_files() {
  std::string kept;
  all_or_rethrow(group_, [&] {
    if (group_->rank() != 0) return;
    const bool is_fresh = state_.progress.step == 0 && !arguments_.overwrite_run;
    if (arguments_.metrics_file && is_fresh) kept = keep_earlier_metrics(*arguments_.metrics_file);
    metrics_files_->open(make_metrics_writers(arguments_, state_.progress.step));
  });
  if (!kept.empty()) {
    callbacks_.print_on_first_rank("the steps of another run in --metrics-file " + *arguments_.metrics_file +
                                   " are kept as " + kept);
  }
  if (!arguments_.metrics_file || group_->rank() != 0) return;
  events_.open(*arguments_.metrics_file, state_.progress.step);
  events_.start(arguments_, state_.progress);
}

}  // namespace megashard
