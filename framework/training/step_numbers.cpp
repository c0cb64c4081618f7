#include "framework/training/step_numbers.h"

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

std::vector<double> flat(const HostNumbers& host) {
  std::vector<double> values = {host.stop_request, host.save_failed, host.time_is_up};
  values.insert(values.end(), host.measures.begin(), host.measures.end());
  return values;
}

/// `of_device`: how many of them come from there.
RankNumbers rank_numbers(std::span<const double> field, size_t of_device) {
  const auto routers = field.subspan(4, of_device - 4), host = field.subspan(of_device), measures = host.subspan(3);
  return {.weighted_loss = field[0],
          .tokens = field[1],
          .grad_norm = field[2],
          .loss_scale = field[3],
          .router_losses = {routers.begin(), routers.end()},
          .host = {.stop_request = host[0],
                   .save_failed = host[1],
                   .time_is_up = host[2],
                   .measures = {measures.begin(), measures.end()}}};
}

}  // namespace

StepNumbers::StepNumbers(ProcessGroupPtr group, c10::Device device) : group_(std::move(group)), device_(device) {}

void StepNumbers::add(const at::Tensor& of_device, const HostNumbers& of_host) {
  const std::vector<double> values = flat(of_host);
  const at::Tensor host = at::empty({std::ssize(values)}, on_host(device_));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<double>());
  of_device_ = static_cast<size_t>(of_device.size(0));
  steps_.push_back(at::cat({of_device, host.to(device_, /*non_blocking=*/true)}));
}

void StepNumbers::start_read() {
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

std::vector<StepOfRanks> StepNumbers::finish_read() {
  if (!copy_.defined()) start_read();
  if (copied_) copied_->synchronize();
  const auto* first = copy_.const_data_ptr<double>();
  const auto numbers = static_cast<size_t>(copy_.size(2));
  std::vector<StepOfRanks> read(steps_.size());
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (auto& step : read) {
      step.push_back(rank_numbers({first, numbers}, of_device_));
      first += numbers;
    }
  }
  steps_.clear();
  copy_.reset();
  copied_.reset();
  return read;
}

}  // namespace megashard
