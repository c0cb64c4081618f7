#include "framework/training/step_timers.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace megashard {
namespace {

const char* name_of(StepPart part) {
  constexpr const char* kNames[] = {"forward-backward", "optimizer-clip-main-grad", "optimizer-inner-step",
                                    "optimizer",        "save-checkpoint",          "evaluate",
                                    "batch-generator",  "forward-compute",          "backward-compute"};
  return kNames[static_cast<size_t>(part)];
}

}  // namespace

StepTimers::StepTimers(int64_t level, TimingLogOption option, ProcessGroupPtr group, c10::Device device)
    : level_(level), option_(option), group_(std::move(group)), device_(device) {}

void StepTimers::wait_for_device() const {
  if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

void StepTimers::start(StepPart part) {
  if (!is_timed(part)) return;
  wait_for_device();
  begun_[static_cast<size_t>(part)] = Clock::now();
}

void StepTimers::stop(StepPart part) {
  if (!is_timed(part)) return;
  wait_for_device();
  const auto passed = Clock::now() - begun_[static_cast<size_t>(part)];
  milliseconds_[static_cast<size_t>(part)] += std::chrono::duration<double, std::milli>(passed).count();
}

std::string StepTimers::log_steps(int64_t steps) {
  std::vector<StepPart> parts = {StepPart::kForwardBackward, StepPart::kClip, StepPart::kInnerStep,
                                 StepPart::kOptimizer};
  if (level_ > 1) parts.insert(parts.end(), {StepPart::kBatch, StepPart::kForward, StepPart::kBackward});
  return lines(parts, steps);
}

std::string StepTimers::log(StepPart part) { return lines({part}, 1); }

std::string StepTimers::lines(const std::vector<StepPart>& parts, int64_t steps) {
  const auto count = static_cast<int64_t>(parts.size());
  const int64_t ranks = group_->size();
  at::Tensor all = at::empty({ranks * count}, at::kDouble);
  double* mine = all.mutable_data_ptr<double>() + group_->rank() * count;
  for (const StepPart part : parts) {
    double& total = milliseconds_[static_cast<size_t>(part)];
    *mine++ = std::exchange(total, 0) / static_cast<double>(steps);
  }
  if (ranks > 1) {
    all = all.to(device_);
    group_->all_gather_into(all, all.narrow(0, group_->rank() * count, count)).wait();
    all = all.cpu();
  }
  const auto* values = all.const_data_ptr<double>();
  PartTimes times;
  for (int64_t part = 0; part < count; ++part) {
    times.emplace_back(name_of(parts[static_cast<size_t>(part)]), std::vector<double>());
    for (int64_t rank = 0; rank < ranks; ++rank) times.back().second.push_back(values[rank * count + part]);
  }
  return timer_log_lines(times, option_);
}

}  // namespace megashard
