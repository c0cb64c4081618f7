#include "framework/training/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <utility>

#include "framework/callbacks/callbacks.h"
#include "framework/training/loss_scale.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/fsdp/grad_norm.h"

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;

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

/// How many micro batches have the sequences of a term of the loss.
int64_t micro_batches_together(const TrainingPlan& plan, const Objective& objective) {
  if (!plan.step.loss_by_weights || plan.data.sets.neat_packing) return 1;
  const int64_t size = plan.length.batches.micro_batch_size;
  return std::lcm(size, objective.rows_per_term()) / size;
}

TrainingDataOptions data_for(const TrainingPlan& plan, const std::shared_ptr<const Objective>& objective) {
  TrainingDataOptions data = plan.data;
  data.sets.group = objective->rows_per_term();
  data.sets.last_tokens = objective->needs().last_tokens;
  data.loading.prepare = [objective](Batch& batch) { objective->prepare(batch); };
  data.micro_batches_together = micro_batches_together(plan, *objective);
  return data;
}

std::unique_ptr<StepTimers> make_timers(const LoggingArguments& log, const ProcessGroupPtr& world, c10::Device device) {
  if (log.timing_log_level == 0) return nullptr;
  return std::make_unique<StepTimers>(log.timing_log_level, log.timing_log_option, world, device);
}

/// Megatron's log line and its timers.
class LogLines : public Listener {
 public:
  /// `timers`: null without --timing-log-level. `log` must outlive this.
  LogLines(const LoggingArguments& log, StepTimers* timers, PrintLine print)
      : log_(log), timers_(timers), print_(std::move(print)) {}

  void step_ended(const StepReport& step) override {
    if (!step.has_line) return;
    print_(training_log_line(log_time_now(), step, log_));
    if (timers_ != nullptr) print_(timers_->log_steps(step.interval.steps));
  }

 private:
  const LoggingArguments& log_;
  StepTimers* timers_;
  PrintLine print_;
};

/// Optional metrics (zero count, parameter norm). Blocks the host once for both. Collective.
void measure_gradients_and_weights(const LoggingArguments& log, const MultiModalModule& model,
                                   const Optimizer& optimizer, c10::Device device, StepReport& report) {
  std::vector<at::Tensor> measured;
  const auto measure = [&](const at::Tensor& each) { measured.push_back(each.to(device, at::kDouble)); };
  if (log.log_num_zeros_in_grad) measure(count_zero_gradients(optimizer.parameters()));
  if (log.log_params_norm) measure(total_parameter_norm(model.parameters()));
  if (measured.empty()) return;
  const at::Tensor on_host = at::stack(measured).cpu();
  const auto* next = on_host.const_data_ptr<double>();
  if (log.log_num_zeros_in_grad) report.zeros_in_grad = *next++;
  if (log.log_params_norm) report.params_norm = *next;
}

}  // namespace

Trainer::Trainer(TrainingPlan plan, MultiModalModule& model, const ParallelGroups& groups, c10::Device device,
                 TrainerCallbacks callbacks)
    : plan_(std::move(plan)),
      model_(model),
      world_(groups.world),
      device_(device),
      callbacks_(std::move(callbacks)),
      optimizer_(make_optimizer(named_parameters(model), for_model(plan_.optimizer, model))),
      schedule_(plan_.schedule),
      scaler_(make_scaler(plan_.loss_scale, optimizer_->parameters())),
      timers_(make_timers(plan_.log, world_, device_)),
      objective_(make_objective(plan_.objective, plan_.objective_options)),
      step_(model, *objective_, *optimizer_, groups.sharding, device_,
            [&] {
              TrainStepOptions options = plan_.step;
              options.sink = callbacks_.sink;
              options.timers = timers_.get();
              options.scaler = scaler_.get();
              options.reference = callbacks_.reference;
              options.micro_batches_together = static_cast<size_t>(micro_batches_together(plan_, *objective_));
              options.sequence = sequence_ranks(plan_.sequences, model, groups.sharding);
              return options;
            }()),
      state_{plan_.arguments, model, optimizer_.get(), &schedule_, device_},
      data_(data_for(plan_, objective_), plan_.length, groups.sharding->rank(), world_, device_),
      document_flops_(model, data_.seq_length(), world_->size() / plan_.length.batches.data_parallel_size),
      search_(model, step_, data_, world_),
      reader_(world_, device_,
              {.tensor_parallel_size = groups.tensor_parallel == nullptr ? 1 : groups.tensor_parallel->size(),
               .is_scaled = scaler_ != nullptr,
               .sink = callbacks_.sink,
               .fail = [&]() -> StepReader::Fail {
                 if (!plan_.step.needs_finite_gradients) return nullptr;
                 return [this](const std::string& what, StepReader::NotFinite which, const std::string& remedy) {
                   search_.fail(what, which, remedy, loop_.batches, state_.progress);
                 };
               }()}),
      evaluation_(plan_.length.eval_iters, model, step_, data_, reader_, world_, device_, timers_.get(), callbacks_,
                  [this] { return host_stats(0, {}); }),
      metrics_files_(std::make_shared<MetricsFiles>(plan_.log, callbacks_.sink)),
      saver_(std::make_shared<CheckpointSaver>(
          state_, world_, callbacks_.print_on_first_rank,
          [sink = callbacks_.sink](const std::string& line) {
            if (sink) sink(Severity::kWarning, line);
          },
          [this](const std::string& why) { metrics_files_->events().save_failed(why, state_.progress.step); })) {
  state_.scaler = scaler_.get();
  const bool takes_latents = model.latent_patches().has_value();
  require(takes_latents == objective_->needs().latents,
          "--objective " + plan_.objective +
              (takes_latents ? " is a loss of tokens, and the model takes latents; give flow-matching or ddpm."
                             : " is a loss of latents, and the model takes tokens; leave it out."));
  const int64_t together = objective_->rows_per_term();
  const MicrobatchOptions& batches = plan_.length.batches;
  const bool is_apart = !plan_.data.sets.neat_packing && batches.micro_batch_size % together != 0;
  const std::string compares =
      c10::str("--objective ", plan_.objective, " compares ", together, " neighbouring samples; give ");
  require(!is_apart || (plan_.step.loss_by_weights && plan_.data.rollouts.folder.empty()),
          compares + "--micro-batch-size a multiple of it, or with data sets --loss-by-weights.");
  const int64_t of_rank = batches.global_batch_size / batches.data_parallel_size;
  require(!is_apart || (batches.rampup.empty() && of_rank % std::lcm(batches.micro_batch_size, together) == 0),
          compares + "a constant --global-batch-size of which each rank has a multiple of it.");
  require(together == 1 || plan_.data.order == SamplerType::kSingle,
          "--objective " + plan_.objective +
              " compares neighbouring samples, which --dataloader-type cyclic takes apart; leave it out.");
  check_overrides(plan_.optimizer.overrides, *optimizer_, world_);
  if (!plan_.first_weights.empty()) search_.note_loaded(plan_.first_weights);
  add_listeners();
}

void Trainer::add_listeners() {
  const bool is_first_rank = world_->rank() == 0;
  const LoggingArguments& log = plan_.log;
  const PrintLine& print = callbacks_.print_on_first_rank;
  listeners_ = callbacks_.listeners;
  listeners_.push_back(std::make_shared<DueSteps>(plan_.due, is_first_rank, callbacks_.program_start));
  std::shared_ptr<MemoryLog> memory;
  if (log.log_memory && is_first_rank) {
    memory = std::make_shared<MemoryLog>(
        model_, *optimizer_, device_,
        MemoryLog::Sources{.live_bytes = callbacks_.live_memory_bytes, .peak_bytes = callbacks_.peak_memory_bytes});
    listeners_.push_back(std::make_shared<MemoryLines>(memory, metrics_files_->events(), print));
  }
  if (log.profile && std::ranges::count(log.profile_ranks, world_->rank()) > 0)
    listeners_.push_back(std::make_shared<Profiler>(log, *world_, device_, memory, metrics_files_->events(), print));
  listeners_.push_back(std::make_shared<LogLines>(log, timers_.get(), print));
  listeners_.push_back(metrics_files_);
  std::ranges::copy(make_callbacks(plan_.callbacks, plan_.callback_options), std::back_inserter(listeners_));
  listeners_.push_back(saver_);
}

void Trainer::load(const CheckpointStep& step, bool weights_only) {
  enter_phase("load of step", step.iteration);
  const std::string folder = std::filesystem::path(step.folder).parent_path().string();
  callbacks_.print_on_first_rank(loading_line(folder, step.is_release ? std::nullopt : std::optional(step.iteration)));
  const auto lines = load_training_checkpoint(state_, step, world_, weights_only);
  search_.note_loaded(step.folder + (plan_.frozen_weights.empty() ? "" : " and " + plan_.frozen_weights));
  if (!step.is_release && !weights_only) saver_->note_loaded(step);
  callbacks_.print_on_first_rank(loaded_line(folder, state_.progress.step));
  for (const auto& line : lines) callbacks_.print_on_first_rank(line);
}

void Trainer::prepare_training() {
  saver_->check();
  const RunLength& length = plan_.length;
  loop_ = {.microbatches = Microbatches(length.batches, state_.progress.samples), .train_iters = length.train_iters};
  if (length.train_samples) {
    loop_.train_iters =
        iterations_for_samples(length.batches, *length.train_samples, state_.progress.step, state_.progress.samples);
  }
  all_or_rethrow(world_, [this] { data_.build(loop_.train_iters, state_.progress, callbacks_.print_on_first_rank); });
  try_output_paths(plan_.outputs, world_);
  if (!length.skip_train) saver_->begin_run(/*converts=*/false);
  metrics_files_->open(plan_.arguments, state_.progress, world_, callbacks_.print_on_first_rank);
  if (plan_.saves.save && plan_.saves.async_save) saver_->enable_async();
  callbacks_.print_on_first_rank("training ...");
  callbacks_.print_on_first_rank(datetime_line("before the start of training step", log_time_now()));
  model_.train();
  const TrainingRun run{model_,
                        *optimizer_,
                        world_,
                        device_,
                        state_.progress.step,
                        callbacks_.print_on_first_rank,
                        ArgumentView(plan_.arguments)};
  notify([&](Listener& each) { each.training_starts(run); });
}

bool Trainer::reads_step(int64_t step) const {
  return device_.is_cpu() || plan_.step.needs_finite_gradients || line_is_due(step) ||
         std::ranges::any_of(listeners_, [step](const auto& each) { return each->reads(step); });
}

Requests Trainer::requests() {
  Requests all;
  notify([&, step = state_.progress.step + 1](Listener& each) { all |= each.requests(step); });
  return all;
}

HostStats Trainer::host_stats(double data_wait_seconds, const Requests& requests) const {
  return {.stop_request = callbacks_.stop_request(),
          .requests = requests,
          .measures = measured_metrics({.data_wait_seconds = data_wait_seconds,
                                        .peak_memory_bytes = static_cast<double>(callbacks_.peak_memory_bytes())})};
}

void Trainer::read_steps() {
  reader_.read([this](const StepSummary& step, int64_t samples) {
    state_.progress.flops -= step.saved_flops;
    if (scaler_ != nullptr && !step.skipped) schedule_.advance(samples);
  });
}

bool Trainer::line_is_due(int64_t iteration) const {
  return !loop_.has_reported || iteration == loop_.train_iters || iteration % plan_.log.log_interval == 0;
}

StepReport Trainer::report(bool is_last) {
  const int64_t batch = loop_.samples;
  const double flops = model_.training_flops(batch, loop_.length);
  state_.progress.flops += flops;
  StepInterval& interval = reader_.interval();
  interval.seconds += loop_.seconds;
  interval.samples += batch;
  ++interval.steps;
  const bool is_due = is_last || line_is_due(state_.progress.step);
  loop_.has_reported = true;
  if (is_due && !reader_.empty()) read_steps();
  StepReport report{.iteration = state_.progress.step,
                    .train_iters = loop_.train_iters,
                    .consumed_samples = state_.progress.samples,
                    .global_batch_size = batch,
                    .seq_length = loop_.length,
                    .world_size = world_->size(),
                    .seconds = loop_.seconds,
                    .lr = loop_.lr,
                    .next_lr = schedule_.lr(),
                    .flops = flops,
                    .peak_tflops = callbacks_.peak_tflops,
                    .metric_names = reader_.metric_names(),
                    .step = reader_.last(),
                    .interval = interval,
                    .failed_saves = saver_->failed_in_a_row(),
                    .has_line = is_due};
  if (!is_due) return report;
  measure_gradients_and_weights(plan_.log, model_, *optimizer_, device_, report);
  interval = {};
  return report;
}

void Trainer::wait_for_data() {
  const int64_t step = state_.progress.step + 1;
  enter_phase("wait for the data of step", step);
  loop_.stop = data_.wait_for(step, callbacks_.stop_request);
  loop_.exits = loop_.stop == StopRequest::kExit;
  if (loop_.exits && plan_.saves.save && !saver_->is_saved()) save();
}

void Trainer::run_step() {
  const auto begin = Clock::now();
  const int64_t step = state_.progress.step + 1;
  enter_phase("training step", step);
  notify([step](Listener& each) { each.step_starts(step); });
  const int64_t before = loop_.microbatches->count();
  loop_.microbatches->update(state_.progress.samples);
  // A larger batch can be shared by more ranks: a step to start them from, as Megatron.
  if (plan_.saves.save && loop_.microbatches->count() != before && !saver_->was_just_saved()) save();
  {
    const TimedPart timed(timers_.get(), StepPart::kBatch);
    loop_.batches = data_.next(step, loop_.microbatches->count());
    loop_.samples = data_.samples(std::ssize(loop_.batches));
    // All samples of a step with latents have one shape (LatentDataset).
    loop_.length = model_.latent_patches() ? loop_.batches.front().length() : data_.seq_length();
  }
  const bool reads = reads_step(step);
  const DeviceStats stats = step_.gradients(loop_.batches, step, world_);
  // Whether the step before was skipped decides on this one's rate. The host asks now that the device has this step's
  // forward and backward to do, so that it never runs dry.
  if (scaler_ && !reader_.empty()) read_steps();
  loop_.lr = schedule_.lr();
  optimizer_->set_lr(loop_.lr);
  optimizer_->set_weight_decay(schedule_.weight_decay());
  HostStats host = host_stats(data_.take_wait_seconds(), requests());
  host.saved_flops = document_flops_.saved(loop_.batches);
  if (!reads && world_->size() == 1) {  // the only rank need not ask the device
    reader_.merge(host);
    host.requests = {};
  }
  reader_.add(stats, host, step_.metric_names(), loop_.microbatches->global_batch_size());
  if (reads || scaler_) reader_.start_read();
  notify([step](Listener& each) { each.gradients_ready(step); });
  step_.update();  // what the device does while the host reads
  if (reads) read_steps();
  loop_.batches.clear();
  state_.progress.step = step;
  state_.progress.samples += loop_.samples;
  if (!scaler_) schedule_.advance(loop_.microbatches->global_batch_size());
  search_.note_step();
  notify([step](Listener& each) { each.weights_updated(step); });
  loop_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
}

std::optional<double> Trainer::evaluate(const TrainingData::DatasetPtr& dataset, const std::string& where,
                                        int64_t consumed, bool announces) {
  const auto [loss, stop] =
      evaluation_.run(dataset, where, consumed, *loop_.microbatches, state_.progress.step, announces);
  loop_.stop = std::max(loop_.stop, stop);
  loop_.in_evaluation = loop_.in_evaluation || stop != StopRequest::kNone;
  return loss;
}

std::optional<double> Trainer::evaluate_step() {
  const auto loss = evaluate(data_.valid(), "iteration " + std::to_string(state_.progress.step),
                             state_.progress.validation_samples, /*announces=*/false);
  // A further evaluation, which a callback requests, takes the samples of the next one.
  const bool is_due = state_.progress.step % plan_.length.eval_interval == 0;
  if (loss && is_due)
    state_.progress.validation_samples += plan_.length.eval_iters * loop_.microbatches->global_batch_size();
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
                                                    .train_iters = loop_.train_iters,
                                                    .in_evaluation = loop_.in_evaluation,
                                                    .save = plan_.saves.save,
                                                    .saved_step = saver_->last_in_folder()}));
  return end_of(TrainingEnd::kInterrupted);
}

TrainingEnd Trainer::end_of(TrainingEnd how) {
  reader_.warn_of_unlearnt_steps();
  notify([&](Listener& each) { each.training_ended(how, state_.progress.step); });
  return how;
}

void Trainer::finish_training() {
  callbacks_.print_on_first_rank(datetime_line("after training is done", log_time_now()));
  if (plan_.saves.save && !plan_.length.skip_train && !saver_->is_saved()) save();
  const std::string where = "iteration " + std::to_string(state_.progress.step);
  const auto loss =
      evaluate(data_.valid(), where + " on validation set", state_.progress.validation_samples, /*announces=*/true);
  const bool is_new =
      !plan_.length.skip_train && state_.progress.step % plan_.length.eval_interval != 0;  // not evaluated yet
  if (loss && is_new && saver_->is_best(*loss)) saver_->mark_best(*loss);
  if (loop_.stop == StopRequest::kNone) evaluate(data_.test(), where + " on test set", 0, /*announces=*/true);
}

TrainingEnd Trainer::train() {
  prepare_training();
  while (steps_to_come() && goes_on()) {
    wait_for_data();
    if (!goes_on()) break;
    run_step();
    const auto [stop, requests] = reader_.take_merged();
    loop_.stop = stop;
    loop_.exits = requests.exit;
    StepReport done = report(loop_.exits || loop_.stop != StopRequest::kNone || !steps_to_come());
    notify([&](Listener& each) { each.step_ended(done); });
    if (requests.evaluate && loop_.stop == StopRequest::kNone) done.validation_loss = evaluate_step();
    notify([&](Listener& each) { each.step_complete(done, requests); });
    loop_.exits = loop_.exits || loop_.stop == StopRequest::kExit;
    const bool is_best = done.validation_loss && saver_->is_best(*done.validation_loss);
    if (plan_.saves.save && (requests.save || loop_.exits || is_best))
      save(is_best ? done.validation_loss : std::nullopt);
    if (steps_to_come() && goes_on()) saver_->check_limit();
  }
  notify([this](Listener& each) { each.steps_ended(state_.progress.step); });
  if (goes_on()) finish_training();
  if (loop_.stop == StopRequest::kInterrupt) return interrupted();
  saver_->finish();
  // A save beside the training has had a single try.
  if (plan_.saves.save && plan_.saves.async_save && saver_->failed_in_a_row() > 0) save();
  saver_->finish();
  if (goes_on()) return end_of(TrainingEnd::kDone);
  callbacks_.print_on_first_rank(exit_line(state_.progress.step, log_time_now()));
  callbacks_.print_on_first_rank(datetime_line("after training is done", log_time_now()));
  return end_of(TrainingEnd::kExited);
}

}  // namespace megashard
