// What a trainer measures, and what it tells: log lines, metrics, evaluations.
#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "framework/training/flops.h"
#include "framework/training/progress_clock.h"
#include "framework/training/trainer.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_place.h"
#include "parallel/fsdp/grad_norm.h"

namespace megashard {

namespace {

void add_to(std::vector<double>& sums, const std::vector<double>& values, double factor) {
  sums.resize(std::max(sums.size(), values.size()));
  for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i] * factor;
}

}  // namespace

HostNumbers Trainer::host_numbers(double data_wait_seconds) const {
  HostNumbers numbers;
  numbers.measures = measured_metrics({.data_wait_seconds = data_wait_seconds,
                                       .peak_memory_bytes = static_cast<double>(callbacks_.peak_memory_bytes())});
  numbers.stop_request = static_cast<double>(callbacks_.stop_request());
  numbers.save_failed = saver_.has_failed() ? 1 : 0;
  // Clocks differ from rank to rank: the first rank's counts.
  const auto& minutes = arguments_.exit_duration_in_mins;
  const bool is_late = minutes && seconds_since_start() / 60 > static_cast<double>(*minutes);
  numbers.time_is_up = is_late && group_->rank() == 0 ? 1 : 0;
  return numbers;
}

StepSummary Trainer::summarise(const StepOfRanks& step) {
  StepSummary summary;
  double loss_sum = 0;
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const RankNumbers& of_rank = step[rank];
    const bool has_own_tokens = rank % static_cast<size_t>(arguments_.tensor_model_parallel_size) == 0;
    if (has_own_tokens) {
      loss_sum += of_rank.weighted_loss;
      summary.tokens += of_rank.tokens;
    }
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(of_rank.weighted_loss)) {
      refuse_number(c10::str("the loss of rank ", rank, " is ", of_rank.weighted_loss), NotFinite::kLoss,
                    ": lower the learning rate, or look at the batch; "
                    "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    reduce_metrics(summary.measures, of_rank.host.measures);
    add_to(summary.router_losses, of_rank.router_losses, 1.0 / static_cast<double>(step.size()));
  }
  summary.has_loss = summary.tokens > 0;
  summary.loss = summary.has_loss ? loss_sum / summary.tokens : 0;
  const RankNumbers& mine = step[static_cast<size_t>(group_->rank())];
  summary.grad_norm = mine.grad_norm;
  if (scaler_ == nullptr) return summary;
  summary.skipped = !std::isfinite(mine.grad_norm);
  summary.loss_scale = mine.loss_scale;
  return summary;
}

void Trainer::hear(const HostNumbers& said) {
  heard_.stop = std::max(heard_.stop, static_cast<StopRequest>(said.stop_request));
  heard_.save_failed = heard_.save_failed || said.save_failed != 0;
  heard_.time_is_up = heard_.time_is_up || said.time_is_up != 0;
}

void Trainer::read_steps() {
  const auto steps = numbers_.finish_read();
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const RankNumbers& rank : steps[i]) hear(rank.host);
    last_read_ = summarise(steps[i]);
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(last_read_.grad_norm)) {
      refuse_number(c10::str("the norm of the gradients is ", last_read_.grad_norm), NotFinite::kNorm,
                    ", and the loss is finite: lower the learning rate, or look at the batch and the "
                    "layers' backward; --no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    ++steps_read_;
    if (!last_read_.has_loss) {
      ++interval_.unlearnt_steps;
      if (unlearnt_steps_++ == 0 && callbacks_.sink) callbacks_.sink(Severity::kWarning, unlearnt_batch_line());
    }
    const bool is_number = std::isfinite(last_read_.loss);
    if (is_number && last_read_.has_loss && !last_read_.skipped) {
      interval_.loss_sum += last_read_.loss;
      ++interval_.losses;
      add_to(interval_.router_loss_sums, last_read_.router_losses, 1);
    }
    if (!is_number) ++interval_.nan_steps;
    if (last_read_.skipped) ++interval_.skipped_steps;
    if (scaler_ != nullptr && !last_read_.skipped) schedule_.advance(unread_batches_[i]);
    interval_.tokens_per_sample += last_read_.tokens / static_cast<double>(unread_batches_[i]);
  }
  unread_batches_.clear();
}

void Trainer::measure_gradients_and_weights(StepReport& report) {
  std::vector<at::Tensor> measured;
  const auto measure = [&](const at::Tensor& each) { measured.push_back(each.to(device_, at::kDouble)); };
  const ExpertParallelInfo parts = model_.expert_parallel_info();
  if (arguments_.log_num_zeros_in_grad) measure(count_zero_gradients(optimizer_->parameters(), parts));
  if (arguments_.log_params_norm) measure(total_parameter_norm(model_.parameters(), parts));
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
  const double flops = model_.training_flops(batch, data_options_.seq_length);
  state_.flops_so_far += flops;
  interval_.seconds += last_seconds_;
  interval_.samples += batch;
  ++interval_.steps;
  const bool is_due = is_last || line_is_due(state_.iteration);
  has_reported_ = true;
  if (is_due && !numbers_.empty()) read_steps();
  StepReport report{.arguments = arguments_,
                    .iteration = state_.iteration,
                    .train_iters = train_iters_,
                    .consumed_samples = arguments_.consumed_train_samples,
                    .global_batch_size = batch,
                    .seq_length = data_options_.seq_length,
                    .world_size = group_->size(),
                    .seconds = last_seconds_,
                    .lr = last_lr_,
                    .next_lr = schedule_.lr(),
                    .flops = flops,
                    .peak_tflops = callbacks_.peak_tflops,
                    .step = last_read_,
                    .interval = interval_,
                    .failed_saves = saver_.failed_in_a_row()};
  if (!is_due) return report;
  measure_gradients_and_weights(report);
  print_on_last_rank(training_log_line(log_time_now(), report));
  if (timers_) print_on_last_rank(timers_->tell_steps(interval_.steps));
  interval_ = {};
  return report;
}

void Trainer::write_metrics(const StepReport& report) {
  for (const auto& writer : writers_) {
    try {
      writer->write(report);
    } catch (const std::exception& error) {
      if (!std::exchange(told_of_metrics_, true) && callbacks_.sink)
        callbacks_.sink(Severity::kWarning, error_text(error) + "; training goes on, and leaves out such steps there");
    }
  }
}

void Trainer::print_on_last_rank(const std::string& lines) {
  callbacks_.print_on_last_rank(lines);
  last_rank_printed_ = true;
}

void Trainer::let_last_rank_print() {
  if (std::exchange(last_rank_printed_, false) && group_->size() > 1) group_->barrier();
}

std::optional<double> Trainer::evaluate(const std::shared_ptr<const SampleDataset>& dataset, const std::string& where,
                                        int64_t consumed, Announce announce) {
  const int64_t iterations = arguments_.eval_iters;
  if (dataset == nullptr || iterations == 0) return std::nullopt;
  let_last_rank_print();
  if (announce == Announce::kYes) {
    callbacks_.print_on_first_rank(evaluating_line(iterations * microbatches_->global_batch_size()));
  }
  enter_phase("evaluation after step", state_.iteration);
  const auto loader = make_loader(dataset, consumed);
  StepNumbers numbers(group_, device_);
  StepOfRanks sums(static_cast<size_t>(group_->size()));
  {
    const TimedPart timed(timers_.get(), StepPart::kEvaluate);
    ProgressClock progress(callbacks_.progress_interval);
    model_.eval();
    for (int64_t i = 1; i <= iterations && stop_ == StopRequest::kNone; ++i) {
      at::Tensor loss_and_tokens = at::zeros({4}, at::TensorOptions(at::kDouble).device(device_));
      for (int64_t micro = 0; micro < microbatches_->count(); ++micro)
        loss_and_tokens.narrow(0, 0, 2) += step_.evaluate(loader->next());
      numbers.add(loss_and_tokens, host_numbers(0));
      const StepOfRanks now = numbers.finish_read().front();
      for (size_t rank = 0; rank < now.size(); ++rank) {
        sums[rank].weighted_loss += now[rank].weighted_loss;
        sums[rank].tokens += now[rank].tokens;
        stop_ = std::max(stop_, static_cast<StopRequest>(now[rank].host.stop_request));
      }
      if (i < iterations && progress.is_due()) callbacks_.print_on_first_rank(evaluation_progress_line(i, iterations));
    }
    model_.train();
  }
  in_evaluation_ = stop_ != StopRequest::kNone;
  if (in_evaluation_) return std::nullopt;
  const StepSummary summary = summarise(sums);
  if (summary.has_loss) {
    print_on_last_rank(evaluation_log_lines(where, {{"lm loss", summary.loss}}));
  } else if (callbacks_.sink) {
    callbacks_.sink(Severity::kWarning, "no validation loss at " + where + ": every label of its batches is masked");
  }
  if (timers_) print_on_last_rank(timers_->tell(StepPart::kEvaluate));
  return summary.has_loss ? std::optional(summary.loss) : std::nullopt;
}

}  // namespace megashard
