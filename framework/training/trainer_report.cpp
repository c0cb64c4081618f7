// What a trainer measures, and what it tells: log lines, metrics, evaluations.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "framework/training/finite_weights.h"
#include "framework/training/flops.h"
#include "framework/training/progress_clock.h"
#include "framework/training/trainer.h"
#include "framework/training/training_log.h"
#include "parallel/fsdp/grad_norm.h"

namespace megashard {

Trainer::StepSummary Trainer::summarise(const LossSums& loss, double data_wait_seconds) {
  constexpr int64_t kFields = 6;
  const double mine[kFields] = {loss.weighted_loss,
                                loss.tokens,
                                data_wait_seconds,
                                static_cast<double>(outside_.peak_memory_bytes()),
                                static_cast<double>(outside_.stop_request()),
                                saves_.has_failed() ? 1.0 : 0.0};
  at::Tensor all = at::empty({group_->size() * kFields}, at::kDouble);
  std::copy_n(mine, kFields, all.mutable_data_ptr<double>() + group_->rank() * kFields);
  if (group_->size() > 1) {
    all = all.to(device_);
    group_->all_gather_into(all, all.narrow(0, group_->rank() * kFields, kFields)).wait();
    all = all.cpu();
  }
  const auto* values = all.const_data_ptr<double>();
  StepSummary summary;
  double loss_sum = 0, tokens = 0;
  for (int rank = 0; rank < group_->size(); ++rank, values += kFields) {
    loss_sum += values[0];
    tokens += values[1];
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(values[0])) {
      refuse_number(c10::str("the loss of rank ", rank, " is ", values[0]),
                    ": lower the learning rate, or look at the batch; "
                    "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    summary.data_wait_seconds = std::max(summary.data_wait_seconds, values[2]);
    summary.peak_memory_bytes = std::max(summary.peak_memory_bytes, values[3]);
    summary.stop = std::max(summary.stop, static_cast<StopRequest>(values[4]));
    summary.save_failed = summary.save_failed || values[5] != 0;
  }
  summary.tokens = tokens;
  summary.loss = tokens == 0 ? 0 : loss_sum / tokens;
  return summary;
}

void Trainer::fill_metrics(const StepSummary& summary, double flops) {
  const int64_t batch = microbatches_->global_batch_size();
  StepMetrics metrics;
  metrics.step = state_.iteration;
  metrics.loss = summary.loss;
  metrics.grad_norm = summary.grad_norm;
  metrics.lr = summary.lr;
  metrics.tokens_per_s = static_cast<double>(batch * data_options_.seq_length) / summary.seconds;
  if (outside_.peak_tflops)
    metrics.mfu = tflops_per_device(flops, summary.seconds, group_->size()) / *outside_.peak_tflops;
  metrics.peak_memory_bytes = static_cast<int64_t>(summary.peak_memory_bytes);
  metrics.data_wait_s = summary.data_wait_seconds;
  metrics.step_s = summary.seconds;
  metrics.consumed_samples = arguments_.consumed_train_samples;
  metrics.global_batch_size = batch;
  step_metrics_ = metrics;
}

TrainingLogLine Trainer::log_line(const StepSummary& summary, double flops) {
  const auto steps = static_cast<double>(interval_.steps);
  TrainingLogLine line;
  line.time = log_time_now();
  line.iteration = state_.iteration;
  line.train_iters = train_iters_;
  line.consumed_samples = arguments_.consumed_train_samples;
  line.milliseconds_per_iteration = interval_.seconds * 1000 / steps;
  if (arguments_.log_throughput)
    line.tflops_per_device = tflops_per_device(flops * steps, interval_.seconds, group_->size());
  line.learning_rate = schedule_.lr();
  line.global_batch_size = microbatches_->global_batch_size();
  const int64_t counted = interval_.steps - interval_.nan_steps;
  const double mean = interval_.loss_sum / static_cast<double>(counted);
  line.losses = {{"lm loss", counted > 0 ? mean : std::nan("")}};
  line.nan_iterations = interval_.nan_steps;
  line.grad_norm = summary.grad_norm;
  if (arguments_.log_tps) line.tokens_per_sample = interval_.tokens_per_sample / steps;
  if (arguments_.log_num_zeros_in_grad)
    line.zeros_in_grad =
        count_zero_gradients(optimizer_->parameters(), model_.parts_of_ranks()).item<double>();
  if (arguments_.log_params_norm)
    line.params_norm =
        total_parameter_norm(model_.parameters(), model_.parts_of_ranks()).item<double>();
  if (arguments_.log_tokens_per_second) {
    line.tokens_per_second =
        static_cast<double>(interval_.samples * data_options_.seq_length) / interval_.seconds;
  }
  if (arguments_.log_memory) line.peak_memory_mib = summary.peak_memory_bytes / (1 << 20);
  return line;
}

void Trainer::report(const StepSummary& summary, bool is_last) {
  const int64_t batch = microbatches_->global_batch_size();
  const double flops = model_.training_flops(batch, data_options_.seq_length);
  state_.flops_so_far += flops;
  if (std::isfinite(summary.loss)) {
    interval_.loss_sum += summary.loss;
  } else {
    ++interval_.nan_steps;
  }
  interval_.seconds += summary.seconds;
  interval_.tokens_per_sample += summary.tokens / static_cast<double>(batch);
  interval_.samples += batch;
  ++interval_.steps;
  if (metrics_) fill_metrics(summary, flops);
  const bool is_first = !std::exchange(has_reported_, true);
  if (!is_first && !is_last && state_.iteration % arguments_.log_interval != 0) return;
  const TrainingLogLine line = log_line(summary, flops);
  step_metrics_.zeros_in_grad = line.zeros_in_grad;
  step_metrics_.params_norm = line.params_norm;
  print_on_last_rank(training_log_line(line));
  if (timers_) print_on_last_rank(timers_->tell_steps(interval_.steps));
  interval_ = {};
}

void Trainer::print_on_last_rank(const std::string& lines) {
  outside_.print_on_last_rank(lines);
  last_rank_printed_ = true;
}

void Trainer::let_last_rank_print() {
  if (std::exchange(last_rank_printed_, false) && group_->size() > 1) group_->barrier();
}

void Trainer::agree_on_stop() {
  at::Tensor asked = at::full({1}, static_cast<double>(outside_.stop_request()), at::kDouble);
  if (group_->size() > 1) {
    asked = asked.to(device_);
    group_->all_reduce(asked, ReduceOp::kMax).wait();
  }
  stop_ = static_cast<StopRequest>(asked.item<double>());
}

std::optional<double> Trainer::evaluate(const std::shared_ptr<const SampleDataset>& dataset,
                                        const std::string& where, int64_t consumed,
                                        Announce announce) {
  const int64_t iterations = arguments_.eval_iters;
  if (dataset == nullptr || iterations == 0) return std::nullopt;
  let_last_rank_print();
  if (announce == Announce::kYes) {
    outside_.print_on_first_rank(evaluating_line(iterations * microbatches_->global_batch_size()));
  }
  const auto loader = make_loader(dataset, consumed);
  LossSums sums;
  {
    const TimedPart timed(timers_.get(), StepPart::kEvaluate);
    ProgressClock progress(outside_.progress_interval);
    model_.eval();
    for (int64_t i = 1; i <= iterations && stop_ == StopRequest::kNone; ++i) {
      for (int64_t micro = 0; micro < microbatches_->count(); ++micro) {
        const LossSums one = step_.evaluate(loader->next());
        sums.weighted_loss += one.weighted_loss;
        sums.tokens += one.tokens;
      }
      agree_on_stop();
      if (i < iterations && progress.is_due())
        outside_.print_on_first_rank(evaluation_progress_line(i, iterations));
    }
    model_.train();
  }
  in_evaluation_ = stop_ != StopRequest::kNone;
  if (in_evaluation_) return std::nullopt;
  const double loss = summarise(sums, 0).loss;
  print_on_last_rank(evaluation_log_lines(where, {{"lm loss", loss}}));
  if (timers_) print_on_last_rank(timers_->tell(StepPart::kEvaluate));
  return loss;
}

void Trainer::refuse_number(const std::string& what, const std::string& remedy) {
  const std::string weights =
      has_stepped_ || weights_from_.empty() ? "" : weights_without_numbers(model_, group_);
  TORCH_CHECK(weights.empty(), what, ": of the weights loaded from ", weights_from_, ", ", weights,
              "; training cannot mend them: take other files, or convert these again");
  TORCH_CHECK(false, what, " at iteration ", state_.iteration + 1, remedy);
}

}  // namespace megashard
