// Reports of a trainer: statistics of steps, evaluations.
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

std::optional<double> Trainer::evaluate(const TrainingData::DatasetPtr& dataset, const std::string& where,
                                        int64_t consumed, Announce announce) {
  const int64_t iterations = arguments_.eval_iters;
  if (dataset == nullptr || iterations == 0) return std::nullopt;
  if (announce == Announce::kYes) {
    callbacks_.print_on_first_rank(evaluating_line(iterations * microbatches_->global_batch_size()));
  }
  enter_phase("evaluation after step", state_.progress.step);
  const auto loader = data_.loader(dataset, consumed);
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
  const StepSummary summary = reader_.summarise(sums);
  if (summary.has_loss) {
    callbacks_.print_on_first_rank(evaluation_log_lines(where, {{step_.metric_names().front(), summary.loss}}));
  } else if (callbacks_.sink) {
    callbacks_.sink(Severity::kWarning, "no validation loss at " + where + ": every label of its batches is masked");
  }
  if (timers_) callbacks_.print_on_first_rank(timers_->log(StepPart::kEvaluate));
  return summary.has_loss ? std::optional(summary.loss) : std::nullopt;
}

}  // namespace megashard
