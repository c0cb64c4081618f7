#include "framework/training/step_stats.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <span>
#include <utility>

#include "parallel/device/streams.h"

namespace megashard {
namespace {

at::TensorOptions on_host(c10::Device device) { return at::TensorOptions(at::kDouble).pinned_memory(!device.is_cpu()); }

std::vector<double> flat(const HostStats& host) {
  const Requests& asked = host.requests;
  std::vector<double> values = {static_cast<double>(host.stop_request), asked.save ? 1.0 : 0.0,
                                asked.evaluate ? 1.0 : 0.0, asked.exit ? 1.0 : 0.0, asked.save_failed ? 1.0 : 0.0};
  values.insert(values.end(), host.measures.begin(), host.measures.end());
  return values;
}

/// `of_device`: how many of the numbers come from there.
RankStats rank_stats(std::span<const double> field, size_t of_device) {
  const auto sums = field.subspan(2, of_device - 2), host = field.subspan(of_device), measures = host.subspan(5);
  RankStats stats{.grad_norm = field[0],
                  .loss_scale = field[1],
                  .host = {.stop_request = static_cast<StopRequest>(host[0]),
                           .requests = {.save = host[1] != 0,
                                        .evaluate = host[2] != 0,
                                        .exit = host[3] != 0,
                                        .save_failed = host[4] != 0},
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

}  // namespace megashard
