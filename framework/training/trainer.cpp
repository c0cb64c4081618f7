#include "framework/training/trainer.h"

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "framework/callbacks/callbacks.h"
#include "framework/training/loss_scale.h"
#include "framework/training/metrics_file.h"
#include "framework/training/output_paths.h"
#include "framework/training/run_listeners.h"
#include "framework/training/sequence_group.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_place.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

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

/// Null: losses are not scaled.
std::unique_ptr<GradScaler> make_scaler(const Arguments& arguments, const Optimizer& optimizer) {
  const auto options = scaler_options(arguments);
  if (!options) return nullptr;
  const auto& parameters = optimizer.parameters();
  return std::make_unique<GradScaler>(*options, parameters.empty() ? c10::kCPU : parameters.front().device());
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
      scaler_(make_scaler(arguments, *optimizer_)),
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
      reader_(arguments, group_, device_, scaler_ != nullptr, callbacks_.sink,
              [this](const std::string& what, StepReader::NotFinite which, const std::string& remedy) {
                fail_on_nonfinite(what, which, remedy);
              }),
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
  if (arguments.hf_model && !arguments.from_scratch) weights_from_ = *arguments.hf_model;
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
  weights_from_ = step.folder + (arguments_.lora_r ? " and " + *arguments_.hf_model : "");
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

bool Trainer::steps_to_come() const { return !arguments_.skip_train && state_.progress.step < train_iters_; }

void Trainer::prepare_training() {
  saver_->check();
  const auto batches = microbatch_options(arguments_);
  microbatches_.emplace(batches, state_.progress.samples);
  train_iters_ = arguments_.train_samples ? iterations_for_samples(batches, *arguments_.train_samples,
                                                                   state_.progress.step, state_.progress.samples)
                                          : arguments_.train_iters.value_or(0);
  all_or_rethrow(group_, [this] { data_.build(train_iters_, state_.progress, callbacks_.print_on_first_rank); });
  try_output_paths(output_paths(arguments_, /*saves=*/!arguments_.skip_train), group_);
  if (!arguments_.skip_train) saver_->begin_run(/*converts=*/false);
  open_metrics_files();
  if (arguments_.save && arguments_.async_save) saver_->enable_async();
  callbacks_.print_on_first_rank("training ...");
  callbacks_.print_on_first_rank(datetime_line("before the start of training step", log_time_now()));
  model_.train();
  const TrainingRun run{model_, *optimizer_, group_, device_, state_.progress.step, callbacks_.print_on_first_rank};
  notify([&](Listener& each) { each.training_starts(run); });
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

bool Trainer::reads_step(int64_t step) const {
  return device_.is_cpu() || arguments_.check_for_nan_in_loss_and_grad || line_is_due(step) ||
         std::ranges::any_of(listeners_, [step](const auto& each) { return each->reads(step); });
}

Requests Trainer::requests() {
  Requests all;
  notify([&, step = state_.progress.step + 1](Listener& each) { all |= each.requests(step); });
  return all;
}

DeviceStats Trainer::gradients(const std::vector<Batch>& batches) {
  constexpr int64_t kFirstSteps = 3;
  const int64_t every = arguments_.check_collective_order.value_or(0);
  const bool is_first = steps_of_run_++ < kFirstSteps && arguments_.check_collective_order != 0;
  if (!is_first && (every == 0 || steps_of_run_ % every != 0)) return step_.clip(step_.backward(batches));
  order_.begin_step(state_.progress.step + 1);
  DeviceStats stats;
  try {
    stats = step_.clip(step_.backward(batches));
  } catch (const c10::DistBackendError&) {
    const std::string why = order_.why_it_failed();
    if (!why.empty() && callbacks_.sink) callbacks_.sink(Severity::kWarning, why);
    throw;
  }
  order_.end_step();
  return stats;
}

void Trainer::run_step() {
  const auto begin = Clock::now();
  const int64_t step = state_.progress.step + 1;
  enter_phase("training step", step);
  notify([step](Listener& each) { each.step_starts(step); });
  const int64_t before = microbatches_->count();
  microbatches_->update(state_.progress.samples);
  // A larger batch can be shared by more ranks: a step to start them from, as Megatron.
  if (arguments_.save && microbatches_->count() != before && !saver_->was_just_saved()) save();
  {
    const TimedPart timed(timers_.get(), StepPart::kBatch);
    batches_ = data_.next(microbatches_->count());
  }
  const bool reads = reads_step(step);
  const DeviceStats stats = gradients(batches_);
  // Whether the step before was skipped decides on this one's rate. The host asks now that the device has this step's
  // forward and backward to do, so that it never runs dry.
  if (scaler_ && !reader_.empty()) read_steps();
  last_lr_ = schedule_.lr();
  optimizer_->set_lr(last_lr_);
  optimizer_->set_weight_decay(schedule_.weight_decay());
  HostStats host = host_stats(data_.take_wait_seconds(), requests());
  if (!reads && group_->size() == 1) {  // the only rank need not ask the device
    reader_.merge(host);
    host.requests = {};
  }
  reader_.add(stats, host, step_.metric_names(), microbatches_->global_batch_size());
  if (reads || scaler_) reader_.start_read();
  notify([step](Listener& each) { each.gradients_ready(step); });
  step_.update();  // what the device does while the host reads
  if (reads) read_steps();
  batches_.clear();
  state_.progress.step = step;
  state_.progress.samples += microbatches_->global_batch_size();
  if (!scaler_) schedule_.advance(microbatches_->global_batch_size());
  has_stepped_ = true;
  notify([step](Listener& each) { each.weights_updated(step); });
  last_seconds_ = seconds_between(begin, Clock::now());
}

std::optional<double> Trainer::evaluate_step() {
  const auto loss = evaluate(data_.valid(), "iteration " + std::to_string(state_.progress.step),
                             state_.progress.validation_samples, Announce::kNo);
  // A further evaluation, which a callback requests, takes the samples of the next one.
  const bool is_due = state_.progress.step % arguments_.eval_interval == 0;
  if (loss && is_due) state_.progress.validation_samples += arguments_.eval_iters * microbatches_->global_batch_size();
  return loss;
}

void Trainer::save(std::optional<double> best_loss) {
  if (scaler_ && !reader_.empty()) read_steps();  // the schedule is saved
  {
    const TimedPart timed(timers_.get(), StepPart::kSave);
    enter_phase("save of step", state_.progress.step);
    saver_->save(best_loss);
  }
  if (timers_) callbacks_.print_on_first_rank(timers_->log(StepPart::kSave));
}

TrainingEnd Trainer::interrupted() {
  saver_->finish();
  callbacks_.print_on_first_rank(interruption_line({.iteration = state_.progress.step,
                                                    .train_iters = train_iters_,
                                                    .in_evaluation = in_evaluation_,
                                                    .save = arguments_.save,
                                                    .saved_step = saver_->last_in_folder()}));
  return end_of(TrainingEnd::kInterrupted);
}

TrainingEnd Trainer::end_of(TrainingEnd how) {
  constexpr const char* kNames[] = {"done", "exited", "interrupted"};
  reader_.warn_of_unlearnt_steps();
  events_.end(kNames[static_cast<size_t>(how)], state_.progress.step);
  notify([&](Listener& each) { each.training_ended(how, state_.progress.step); });
  return how;
}

void Trainer::finish_training() {
  callbacks_.print_on_first_rank(datetime_line("after training is done", log_time_now()));
  if (arguments_.save && !arguments_.skip_train && !saver_->is_saved()) save();
  const std::string where = "iteration " + std::to_string(state_.progress.step);
  const auto loss =
      evaluate(data_.valid(), where + " on validation set", state_.progress.validation_samples, Announce::kYes);
  const bool is_new =
      !arguments_.skip_train && state_.progress.step % arguments_.eval_interval != 0;  // not evaluated yet
  if (loss && is_new && saver_->is_best(*loss)) saver_->mark_best(*loss);
  if (stop_ == StopRequest::kNone) evaluate(data_.test(), where + " on test set", 0, Announce::kYes);
}

TrainingEnd Trainer::train() {
  prepare_training();
  while (steps_to_come() && !exits_ && stop_ == StopRequest::kNone) {
    run_step();
    const auto [stop, requests] = reader_.take_merged();
    stop_ = stop;
    exits_ = requests.exit;
    StepReport done = report(exits_ || stop_ != StopRequest::kNone || !steps_to_come());
    notify([&](Listener& each) { each.step_ended(done); });
    if (requests.evaluate && stop_ == StopRequest::kNone) done.validation_loss = evaluate_step();
    notify([&](Listener& each) { each.step_complete(done, requests); });
    exits_ = exits_ || stop_ == StopRequest::kExit;
    const bool is_best = done.validation_loss && saver_->is_best(*done.validation_loss);
    if (arguments_.save && (requests.save || exits_ || is_best)) save(is_best ? done.validation_loss : std::nullopt);
    if (steps_to_come() && !exits_ && stop_ == StopRequest::kNone) saver_->check_limit();
  }
  notify([this](Listener& each) { each.steps_ended(state_.progress.step); });
  if (!exits_ && stop_ == StopRequest::kNone) finish_training();
  if (stop_ == StopRequest::kInterrupt) return interrupted();
  saver_->finish();
  // A save beside the training has had a single try.
  if (arguments_.save && arguments_.async_save && saver_->failed_in_a_row() > 0) save();
  saver_->finish();
  if (!exits_ && stop_ == StopRequest::kNone) return end_of(TrainingEnd::kDone);
  callbacks_.print_on_first_rank(exit_line(state_.progress.step, log_time_now()));
  callbacks_.print_on_first_rank(datetime_line("after training is done", log_time_now()));
  return end_of(TrainingEnd::kExited);
}

}  // namespace megashard
