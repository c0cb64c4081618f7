#include "framework/training/step_reader.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "framework/training/training_log.h"
#include "parallel/device/streams.h"

namespace megashard {
namespace {

at::TensorOptions on_host(c10::Device device) { return at::TensorOptions(at::kDouble).pinned_memory(!device.is_cpu()); }

std::vector<double> flat(const HostStats& host) {
  const Requests& asked = host.requests;
  std::vector<double> values = {static_cast<double>(host.stop_request),
                                asked.save ? 1.0 : 0.0,
                                asked.evaluate ? 1.0 : 0.0,
                                asked.exit ? 1.0 : 0.0,
                                asked.save_failed ? 1.0 : 0.0,
                                host.saved_flops};
  values.insert(values.end(), host.measures.begin(), host.measures.end());
  return values;
}

/// `of_device`: how many of the numbers come from there.
RankStats rank_stats(std::span<const double> field, size_t of_device) {
  const auto sums = field.subspan(2, of_device - 2), host = field.subspan(of_device), measures = host.subspan(6);
  RankStats stats{.grad_norm = field[0],
                  .loss_scale = field[1],
                  .host = {.stop_request = static_cast<StopRequest>(host[0]),
                           .requests = {.save = host[1] != 0,
                                        .evaluate = host[2] != 0,
                                        .exit = host[3] != 0,
                                        .save_failed = host[4] != 0},
                           .saved_flops = host[5],
                           .measures = {measures.begin(), measures.end()}}};
  for (size_t i = 0; i + 1 < sums.size(); i += 2) stats.metrics.push_back({.sum = sums[i], .count = sums[i + 1]});
  return stats;
}

}  // namespace

StepStats::StepStats(ProcessGroupPtr group, c10::Device device) : group_(std::move(group)), device_(device) {}

void StepStats::add(const DeviceStats& of_device, const HostStats& of_host) {
  const std::vector<double> values = flat(of_host);
  const at::Tensor host = at::empty({std::ssize(values)}, on_host(device_));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<double>());
  of_device_ = 2 + static_cast<size_t>(of_device.sums.size(0));
  steps_.push_back(at::cat({at::stack({of_device.grad_norm, of_device.loss_scale}), of_device.sums,
                            host.to(device_, /*non_blocking=*/true)}));
}

void StepStats::start_read() {
  const auto steps = static_cast<int64_t>(steps_.size());
  at::Tensor all = at::stack(steps_).view({-1});
  if (group_->size() > 1) {
    const at::Tensor mine = all;
    all = at::empty({group_->size() * mine.numel()}, mine.options());
    group_->all_gather_into(all, mine).wait();
  }
  copy_ = at::empty({group_->size(), steps, steps_.front().numel()}, on_host(device_));
  copy_.view({-1}).copy_(all, /*non_blocking=*/true);
  if (device_.is_cpu()) return;
  copied_.emplace(device_.type());
  copied_->record(current_stream(device_));
}

std::vector<StepOfRanks> StepStats::finish_read() {
  if (!copy_.defined()) start_read();
  if (copied_) copied_->synchronize();
  const auto* first = copy_.const_data_ptr<double>();
  const auto numbers = static_cast<size_t>(copy_.size(2));
  std::vector<StepOfRanks> read(steps_.size());
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (auto& step : read) {
      step.push_back(rank_stats({first, numbers}, of_device_));
      first += numbers;
    }
  }
  steps_.clear();
  copy_.reset();
  copied_.reset();
  return read;
}

namespace {

void add_to(std::vector<double>& sums, const std::vector<double>& values) {
  sums.resize(std::max(sums.size(), values.size()));
  for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
}

}  // namespace

StepReader::StepReader(ProcessGroupPtr world, c10::Device device, Options options)
    : rank_(static_cast<size_t>(world->rank())), options_(std::move(options)), stats_(std::move(world), device) {}

void StepReader::add(const DeviceStats& of_device, const HostStats& of_host, const std::vector<std::string>& names,
                     int64_t batch) {
  stats_.add(of_device, of_host);
  names_ = names;
  batches_.push_back(batch);
}

void StepReader::merge(const HostStats& of_rank) {
  merged_.stop = std::max(merged_.stop, of_rank.stop_request);
  merged_.requests |= of_rank.requests;
}

StepReader::Merged StepReader::take_merged() { return std::exchange(merged_, {}); }

StepSummary StepReader::summarise(const StepOfRanks& step) const {
  StepSummary summary;
  std::vector<RankStats::Mean> means(step.front().metrics.size());
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const RankStats& of_rank = step[rank];
    const bool has_own_tokens = rank % static_cast<size_t>(options_.tensor_parallel_size) == 0;
    for (size_t i = 0; has_own_tokens && i < means.size(); ++i) {
      means[i].sum += of_rank.metrics[i].sum;
      means[i].count += of_rank.metrics[i].count;
    }
    if (const double loss = of_rank.metrics.front().sum; options_.fail && !std::isfinite(loss)) {
      options_.fail(c10::str("the loss of rank ", rank, " is ", loss), NotFinite::kLoss,
                    ": lower the learning rate, or look at the batch; "
                    "--no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    summary.saved_flops += of_rank.host.saved_flops;
    reduce_metrics(summary.measures, of_rank.host.measures);
  }
  summary.terms = means.front().count;
  summary.has_loss = summary.terms > 0;
  summary.loss = summary.has_loss ? means.front().sum / summary.terms : 0;
  for (size_t i = 1; i < means.size(); ++i)
    summary.further.push_back(means[i].count > 0 ? means[i].sum / means[i].count : std::nan(""));
  const RankStats& mine = step[rank_];
  summary.grad_norm = mine.grad_norm;
  if (!options_.is_scaled) return summary;
  summary.skipped = !std::isfinite(mine.grad_norm);
  summary.loss_scale = mine.loss_scale;
  return summary;
}

void StepReader::add_to_interval(const StepSummary& step, int64_t samples) {
  if (!step.has_loss) {
    ++interval_.unlearnt_steps;
    if (unlearnt_steps_++ == 0 && options_.sink) options_.sink(Severity::kWarning, unlearnt_batch_line());
  }
  const bool is_number = std::isfinite(step.loss);
  if (is_number && step.has_loss && !step.skipped) {
    interval_.loss_sum += step.loss;
    ++interval_.losses;
    add_to(interval_.further_sums, step.further);
  }
  if (!is_number) ++interval_.nan_steps;
  if (step.skipped) ++interval_.skipped_steps;
  interval_.saved_flops += step.saved_flops;
  interval_.tokens_per_sample += step.terms / static_cast<double>(samples);
}

void StepReader::read(const std::function<void(const StepSummary& step, int64_t samples)>& visit) {
  const auto steps = stats_.finish_read();
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const RankStats& rank : steps[i]) merge(rank.host);
    last_ = summarise(steps[i]);
    if (options_.fail && !std::isfinite(last_.grad_norm)) {
      options_.fail(c10::str("the norm of the gradients is ", last_.grad_norm), NotFinite::kNorm,
                    ", and the loss is finite: lower the learning rate, or look at the batch and the "
                    "layers' backward; --no-check-for-nan-in-loss-and-grad goes on regardless");
    }
    ++steps_;
    add_to_interval(last_, batches_[i]);
    visit(last_, batches_[i]);
  }
  batches_.clear();
}

void StepReader::warn_of_unlearnt_steps() const {
  if (unlearnt_steps_ > 0 && options_.sink)
    options_.sink(Severity::kWarning, unlearnt_steps_line(unlearnt_steps_, steps_));
}

}  // namespace megashard
