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

void add_to(std::vector<double>& sums, const std::vector<double>& values) {
  sums.resize(std::max(sums.size(), values.size()));
  for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
}

}  // namespace

HostStats Trainer::host_stats(double data_wait_seconds, const Requests& requests) const {
  return {.stop_request = callbacks_.stop_request(),
          .requests = requests,
          .measures = measured_metrics({.data_wait_seconds = data_wait_seconds,
                                        .peak_memory_bytes = static_cast<double>(callbacks_.peak_memory_bytes())})};
}

StepSummary Trainer::summarise(const StepOfRanks& step) {
  StepSummary summary;
  std::vector<RankStats::Mean> means(step.front().metrics.size());
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const RankStats& of_rank = step[rank];
    const bool has_own_tokens = rank % static_cast<size_t>(arguments_.tensor_model_parallel_size) == 0;
    for (size_t i = 0; has_own_tokens && i < means.size(); ++i) {
      means[i].sum += of_rank.metrics[i].sum;
      means[i].count += of_rank.metrics[i].count;
    }
    if (const double loss = of_rank.metrics.front().sum;
        arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(loss)) {
      fail_on_nonfinite(c10::str("the loss of rank ", rank, " is ", loss), NotFinite::kLoss,
                        ": lower the learning rate, or look at the batch; "
                        "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    reduce_metrics(summary.measures, of_rank.host.measures);
  }
  summary.terms = means.front().count;
  summary.has_loss = summary.terms > 0;
  summary.loss = summary.has_loss ? means.front().sum / summary.terms : 0;
  for (size_t i = 1; i < means.size(); ++i)
    summary.further.push_back(means[i].count > 0 ? means[i].sum / means[i].count : std::nan(""));
  const RankStats& mine = step[static_cast<size_t>(group_->rank())];
  summary.grad_norm = mine.grad_norm;
  if (scaler_ == nullptr) return summary;
  summary.skipped = !std::isfinite(mine.grad_norm);
  summary.loss_scale = mine.loss_scale;
  return summary;
}

void Trainer::merge_requests(const HostStats& of_rank) {
  merged_.stop = std::max(merged_.stop, of_rank.stop_request);
  merged_.requests |= of_rank.requests;
}

void Trainer::read_steps() {
  const auto steps = stats_.finish_read();
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const RankStats& rank : steps[i]) merge_requests(rank.host);
    last_read_ = summarise(steps[i]);
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(last_read_.grad_norm)) {
      fail_on_nonfinite(c10::str("the norm of the gradients is ", last_read_.grad_norm), NotFinite::kNorm,
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
      add_to(interval_.further_sums, last_read_.further);
    }
    if (!is_number) ++interval_.nan_steps;
    if (last_read_.skipped) ++interval_.skipped_steps;
    if (scaler_ != nullptr && !last_read_.skipped) schedule_.advance(unread_batches_[i]);
    interval_.tokens_per_sample += last_read_.terms / static_cast<double>(unread_batches_[i]);
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
  state_.progress.flops += flops;
  interval_.seconds += last_seconds_;
  interval_.samples += batch;
  ++interval_.steps;
  const bool is_due = is_last || line_is_due(state_.progress.step);
  has_reported_ = true;
  if (is_due && !stats_.empty()) read_steps();
  StepReport report{.arguments = arguments_,
                    .iteration = state_.progress.step,
                    .train_iters = train_iters_,
                    .consumed_samples = state_.progress.samples,
                    .global_batch_size = batch,
                    .seq_length = data_options_.seq_length,
                    .world_size = group_->size(),
                    .seconds = last_seconds_,
                    .lr = last_lr_,
                    .next_lr = schedule_.lr(),
                    .flops = flops,
                    .peak_tflops = callbacks_.peak_tflops,
                    .metric_names = metric_names_,
                    .step = last_read_,
                    .interval = interval_,
                    .failed_saves = saver_->failed_in_a_row(),
                    .has_line = is_due};
  if (!is_due) return report;
  measure_gradients_and_weights(report);
  interval_ = {};
  return report;
}

std::optional<double> Trainer::evaluate(const std::shared_ptr<const SampleDataset>& dataset, const std::string& where,
                                        int64_t consumed, Announce announce) {
  const int64_t iterations = arguments_.eval_iters;
  if (dataset == nullptr || iterations == 0) return std::nullopt;
  if (announce == Announce::kYes) {
    callbacks_.print_on_first_rank(evaluating_line(iterations * microbatches_->global_batch_size()));
  }
  enter_phase("evaluation after step", state_.progress.step);
  const auto loader = make_loader(dataset, consumed);
  StepStats stats(group_, device_);
  StepOfRanks sums(static_cast<size_t>(group_->size()));
  {
    const TimedPart timed(timers_.get(), StepPart::kEvaluate);
    ProgressClock progress(callbacks_.progress_interval);
    model_.eval();
    for (int64_t i = 1; i <= iterations && stop_ == StopRequest::kNone; ++i) {
      at::Tensor of_batch = step_.evaluate(loader->next());
      for (int64_t micro = 1; micro < microbatches_->count(); ++micro) of_batch += step_.evaluate(loader->next());
      const at::Tensor none = at::zeros({}, of_batch.options());
      stats.add({.grad_norm = none, .loss_scale = none, .sums = of_batch}, host_stats(0, {}));
      const StepOfRanks now = stats.finish_read().front();
      for (size_t rank = 0; rank < now.size(); ++rank) {
        auto& metrics = sums[rank].metrics;
        metrics.resize(now[rank].metrics.size());
        for (size_t m = 0; m < metrics.size(); ++m) {
          metrics[m].sum += now[rank].metrics[m].sum;
          metrics[m].count += now[rank].metrics[m].count;
        }
        stop_ = std::max(stop_, now[rank].host.stop_request);
      }
      if (i < iterations && progress.is_due()) callbacks_.print_on_first_rank(evaluation_progress_line(i, iterations));
    }
    model_.train();
  }
  in_evaluation_ = stop_ != StopRequest::kNone;
  if (in_evaluation_) return std::nullopt;
  const StepSummary summary = summarise(sums);
  if (summary.has_loss) {
    callbacks_.print_on_first_rank(evaluation_log_lines(where, {{step_.metric_names().front(), summary.loss}}));
  } else if (callbacks_.sink) {
    callbacks_.sink(Severity::kWarning, "no validation loss at " + where + ": every label of its batches is masked");
  }
  if (timers_) callbacks_.print_on_first_rank(timers_->log(StepPart::kEvaluate));
  return summary.has_loss ? std::optional(summary.loss) : std::nullopt;
}

}  // namespace megashard
