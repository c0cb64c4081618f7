#include "framework/training/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

#include "framework/training/output_paths.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/fsdp/grad_norm.h"

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

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

HostStats Trainer::host_stats(double data_wait_seconds, const Requests& requests) const {
  return {.stop_request = callbacks_.stop_request(),
          .requests = requests,
          .measures = measured_metrics({.data_wait_seconds = data_wait_seconds,
                                        .peak_memory_bytes = static_cast<double>(callbacks_.peak_memory_bytes())})};
}

void Trainer::read_steps() {
  reader_.read([this](int64_t samples) {
    if (scaler_ != nullptr) schedule_.advance(samples);
  });
}

void Trainer::measure_gradients_and_weights(StepReport& report) {
  std::vector<at::Tensor> measured;
  const auto measure = [&](const at::Tensor& each) { measured.push_back(each.to(device_, at::kDouble)); };
  if (arguments_.log_num_zeros_in_grad) measure(count_zero_gradients(optimizer_->parameters()));
  if (arguments_.log_params_norm) measure(total_parameter_norm(model_.parameters()));
  if (measured.empty()) return;
  const at::Tensor on_host = at::stack(measured).cpu();
  const auto* next = on_host.const_data_ptr<double>();
  if (arguments_.log_num_zeros_in_grad) report.zeros_in_grad = *next++;
  if (arguments_.log_params_norm) report.params_norm = *next;
}

bool Trainer::line_is_due(int64_t iteration) const {
  return !has_reported_ || iteration == train_iters_ || iteration % arguments_.log_interval == 0;
}

StepReport Trainer::report(bool is_last) {
  const int64_t batch = microbatches_->global_batch_size();
  const double flops = model_.training_flops(batch, data_.seq_length());
  state_.progress.flops += flops;
  StepInterval& interval = reader_.interval();
  interval.seconds += last_seconds_;
  interval.samples += batch;
  ++interval.steps;
  const bool is_due = is_last || line_is_due(state_.progress.step);
  has_reported_ = true;
  if (is_due && !reader_.empty()) read_steps();
  StepReport report{.arguments = arguments_,
                    .iteration = state_.progress.step,
                    .train_iters = train_iters_,
                    .consumed_samples = state_.progress.samples,
                    .global_batch_size = batch,
                    .seq_length = data_.seq_length(),
                    .world_size = group_->size(),
                    .seconds = last_seconds_,
                    .lr = last_lr_,
                    .next_lr = schedule_.lr(),
                    .flops = flops,
                    .peak_tflops = callbacks_.peak_tflops,
                    .metric_names = reader_.metric_names(),
                    .step = reader_.last(),
                    .interval = interval,
                    .failed_saves = saver_->failed_in_a_row(),
                    .has_line = is_due};
  if (!is_due) return report;
  measure_gradients_and_weights(report);
  interval = {};
  return report;
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
  search_.note_step();
  notify([step](Listener& each) { each.weights_updated(step); });
  last_seconds_ = seconds_between(begin, Clock::now());
}

std::optional<double> Trainer::evaluate(const TrainingData::DatasetPtr& dataset, const std::string& where,
                                        int64_t consumed, bool announces) {
  const auto [loss, stop] = evaluation_.run(dataset, where, consumed, *microbatches_, state_.progress.step, announces);
  stop_ = std::max(stop_, stop);
  in_evaluation_ = in_evaluation_ || stop != StopRequest::kNone;
  return loss;
}

std::optional<double> Trainer::evaluate_step() {
  const auto loss = evaluate(data_.valid(), "iteration " + std::to_string(state_.progress.step),
                             state_.progress.validation_samples, /*announces=*/false);
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
      evaluate(data_.valid(), where + " on validation set", state_.progress.validation_samples, /*announces=*/true);
  const bool is_new =
      !arguments_.skip_train && state_.progress.step % arguments_.eval_interval != 0;  // not evaluated yet
  if (loss && is_new && saver_->is_best(*loss)) saver_->mark_best(*loss);
  if (stop_ == StopRequest::kNone) evaluate(data_.test(), where + " on test set", 0, /*announces=*/true);
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
