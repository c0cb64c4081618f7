#include "framework/training/step_numbers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

#include "parallel/device/streams.h"

namespace megashard {
namespace {

constexpr int64_t kOfDevice = 3, kOfHost = 5, kFields = kOfDevice + kOfHost;

at::TensorOptions on_host(c10::Device device) { return at::TensorOptions(at::kDouble).pinned_memory(!device.is_cpu()); }

RankNumbers rank_numbers(const double* field) {
  return {.weighted_loss = field[0],
          .tokens = field[1],
          .grad_norm = field[2],
          .host = {.data_wait_seconds = field[3],
                   .peak_memory_bytes = field[4],
                   .stop_request = field[5],
                   .save_failed = field[6],
                   .time_is_up = field[7]}};
}

}  // namespace

StepNumbers::StepNumbers(ProcessGroupPtr group, c10::Device device) : group_(std::move(group)), device_(device) {}

void StepNumbers::add(const at::Tensor& of_device, const HostNumbers& of_host) {
  const std::array<double, kOfHost> values = {of_host.data_wait_seconds, of_host.peak_memory_bytes,
                                              of_host.stop_request, of_host.save_failed, of_host.time_is_up};
  const at::Tensor host = at::empty({kOfHost}, on_host(device_));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<double>());
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
  copy_ = at::empty({group_->size(), steps, kFields}, on_host(device_));
  copy_.view({-1}).copy_(all, /*non_blocking=*/true);
  if (device_.is_cpu()) return;
  copied_.emplace(device_.type());
  copied_->record(current_stream(device_));
}

std::vector<StepOfRanks> StepNumbers::finish_read() {
  if (!copy_.defined()) start_read();
  if (copied_) copied_->synchronize();
  const auto* first = copy_.const_data_ptr<double>();
  std::vector<StepOfRanks> read(steps_.size());
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (auto& step : read) {
      step.push_back(rank_numbers(first));
      first += kFields;
    }
  }
  steps_.clear();
  copy_.reset();
  copied_.reset();
  return read;
}

}  // namespace megashard
