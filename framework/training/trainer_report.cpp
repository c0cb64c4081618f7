// What a trainer measures, and what it tells: log lines, metrics, evaluations.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

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

HostNumbers Trainer::host_numbers(double data_wait_seconds) const {
  HostNumbers numbers;
  numbers.data_wait_seconds = data_wait_seconds;
  numbers.peak_memory_bytes = static_cast<double>(outside_.peak_memory_bytes());
  numbers.stop_request = static_cast<double>(outside_.stop_request());
  numbers.save_failed = saves_.has_failed() ? 1 : 0;
  // Clocks differ from rank to rank: the first rank's counts.
  const auto& minutes = arguments_.exit_duration_in_mins;
  const bool is_late = minutes && seconds_since_start() / 60 > static_cast<double>(*minutes);
  numbers.time_is_up = is_late && group_->rank() == 0 ? 1 : 0;
  return numbers;
}

Trainer::StepSummary Trainer::summarise(const StepOfRanks& step) {
  StepSummary summary;
  double loss_sum = 0;
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const RankNumbers& of_rank = step[rank];
    loss_sum += of_rank.weighted_loss;
    summary.tokens += of_rank.tokens;
    if (arguments_.check_for_nan_in_loss_and_grad && !std::isfinite(of_rank.weighted_loss)) {
      refuse_number(c10::str("the loss of rank ", rank, " is ", of_rank.weighted_loss),
                    ": lower the learning rate, or look at the batch; "
                    "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    summary.data_wait_seconds = std::max(summary.data_wait_seconds, of_rank.host.data_wait_seconds);
    summary.peak_memory_bytes = std::max(summary.peak_memory_bytes, of_rank.host.peak_memory_bytes);
  }
  summary.loss = summary.tokens == 0 ? 0 : loss_sum / summary.tokens;
  summary.grad_norm = step[static_cast<size_t>(group_->rank())].grad_norm;
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
      refuse_number(c10::str("the norm of the gradients is ", last_read_.grad_norm),
                    ", and the loss is finite: lower the learning rate, or look at the batch and the "
                    "layers' backward; --no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    if (std::isfinite(last_read_.loss)) {
      interval_.loss_sum += last_read_.loss;
    } else {
      ++interval_.nan_steps;
    }
    interval_.tokens_per_sample += last_read_.tokens / static_cast<double>(unread_batches_[i]);
  }
  unread_batches_.clear();
}

void Trainer::fill_metrics(double flops) {
  const int64_t batch = microbatches_->global_batch_size();
  StepMetrics metrics;
  metrics.step = state_.iteration;
  metrics.loss = last_read_.loss;
  metrics.grad_norm = last_read_.grad_norm;
  metrics.lr = last_lr_;
  metrics.tokens_per_s = static_cast<double>(batch * data_options_.seq_length) / last_seconds_;
  if (outside_.peak_tflops)
    metrics.mfu = tflops_per_device(flops, last_seconds_, group_->size()) / *outside_.peak_tflops;
  metrics.peak_memory_bytes = static_cast<int64_t>(last_read_.peak_memory_bytes);
  metrics.data_wait_s = last_read_.data_wait_seconds;
  metrics.step_s = last_seconds_;
  metrics.consumed_samples = arguments_.consumed_train_samples;
  metrics.global_batch_size = batch;
  step_metrics_ = metrics;
}

TrainingLogLine Trainer::log_line(double flops) {
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
  line.grad_norm = last_read_.grad_norm;
  if (arguments_.log_tps) line.tokens_per_sample = interval_.tokens_per_sample / steps;
  if (arguments_.log_num_zeros_in_grad)
    line.zeros_in_grad = count_zero_gradients(optimizer_->parameters(), model_.expert_parallel_info()).item<double>();
  if (arguments_.log_params_norm)
    line.params_norm = total_parameter_norm(model_.parameters(), model_.expert_parallel_info()).item<double>();
  if (arguments_.log_tokens_per_second) {
    line.tokens_per_second = static_cast<double>(interval_.samples * data_options_.seq_length) / interval_.seconds;
  }
  if (arguments_.log_memory) line.peak_memory_mib = last_read_.peak_memory_bytes / (1 << 20);
  return line;
}

bool Trainer::line_is_due(int64_t iteration) const {
  return !has_reported_ || iteration == train_iters_ || iteration % arguments_.log_interval == 0;
}

void Trainer::report(bool is_last) {
  const int64_t batch = microbatches_->global_batch_size();
  const double flops = model_.training_flops(batch, data_options_.seq_length);
  state_.flops_so_far += flops;
  interval_.seconds += last_seconds_;
  interval_.samples += batch;
  ++interval_.steps;
  if (metrics_) fill_metrics(flops);
  const bool is_due = is_last || line_is_due(state_.iteration);
  has_reported_ = true;
  if (!is_due) return;
  if (!numbers_.empty()) read_steps();
  const TrainingLogLine line = log_line(flops);
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

std::optional<double> Trainer::evaluate(const std::shared_ptr<const SampleDataset>& dataset, const std::string& where,
                                        int64_t consumed, Announce announce) {
  const int64_t iterations = arguments_.eval_iters;
  if (dataset == nullptr || iterations == 0) return std::nullopt;
  let_last_rank_print();
  if (announce == Announce::kYes) {
    outside_.print_on_first_rank(evaluating_line(iterations * microbatches_->global_batch_size()));
  }
  const auto loader = make_loader(dataset, consumed);
  StepNumbers numbers(group_, device_);
  StepOfRanks sums(static_cast<size_t>(group_->size()));
  {
    const TimedPart timed(timers_.get(), StepPart::kEvaluate);
    ProgressClock progress(outside_.progress_interval);
    model_.eval();
    for (int64_t i = 1; i <= iterations && stop_ == StopRequest::kNone; ++i) {
      at::Tensor loss_and_tokens = at::zeros({3}, at::TensorOptions(at::kDouble).device(device_));
      for (int64_t micro = 0; micro < microbatches_->count(); ++micro)
        loss_and_tokens.narrow(0, 0, 2) += step_.evaluate(loader->next());
      numbers.add(loss_and_tokens, host_numbers(0));
      const StepOfRanks now = numbers.finish_read().front();
      for (size_t rank = 0; rank < now.size(); ++rank) {
        sums[rank].weighted_loss += now[rank].weighted_loss;
        sums[rank].tokens += now[rank].tokens;
        stop_ = std::max(stop_, static_cast<StopRequest>(now[rank].host.stop_request));
      }
      if (i < iterations && progress.is_due()) outside_.print_on_first_rank(evaluation_progress_line(i, iterations));
    }
    model_.train();
  }
  in_evaluation_ = stop_ != StopRequest::kNone;
  if (in_evaluation_) return std::nullopt;
  const double loss = summarise(sums).loss;
  print_on_last_rank(evaluation_log_lines(where, {{"lm loss", loss}}));
  if (timers_) print_on_last_rank(timers_->tell(StepPart::kEvaluate));
  return loss;
}

void Trainer::refuse_number(const std::string& what, const std::string& remedy) {
  const std::string weights = has_stepped_ || weights_from_.empty() ? "" : weights_without_numbers(model_, group_);
  TORCH_CHECK(weights.empty(), what, ": of the weights loaded from ", weights_from_, ", ", weights,
              "; training cannot mend them: take other files, or convert these again");
  TORCH_CHECK(false, what, " at iteration ", state_.iteration + 1, remedy);
}

}  // namespace megashard
