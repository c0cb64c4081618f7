#pragma once

#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/training/training_log.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// What is timed, by --timing-log-level; named and ordered as Megatron's timers.
enum class StepPart {
  kForwardBackward,  // from here on of level 1
  kClip,
  kInnerStep,
  kOptimizer,
  kSave,
  kEvaluate,
  kBatch,  // from here on of level 2
  kForward,
  kBackward,
};

/// Megatron's timers. On a GPU each start and stop waits for it.
class StepTimers {
 public:
  /// `level`: 1 or 2. `option`: of --timing-log-option.
  StepTimers(int64_t level, TimingLogOption option, ProcessGroupPtr group, c10::Device device);

  /// Parts of higher levels are not timed.
  void start(StepPart part);
  void stop(StepPart part);

  /// Lines with the times of a step since the last call: mean of `steps`. Collective.
  std::string log_steps(int64_t steps);
  /// The same of one part alone. Collective.
  std::string log(StepPart part);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kParts = static_cast<size_t>(StepPart::kBackward) + 1;

  bool is_timed(StepPart part) const { return level_ > 1 || part < StepPart::kBatch; }
  void wait_for_device() const;
  std::string lines(const std::vector<StepPart>& parts, int64_t steps);

  int64_t level_;
  TimingLogOption option_;
  ProcessGroupPtr group_;
  c10::Device device_;
  std::array<Clock::time_point, kParts> begun_{};
  std::array<double, kParts> milliseconds_{};
};

/// Times a part while it lives. Null timers (level 0): nothing.
class TimedPart {
 public:
  TimedPart(StepTimers* timers, StepPart part) : timers_(timers), part_(part) {
    if (timers_ != nullptr) timers_->start(part_);
  }
  ~TimedPart() {
    if (timers_ != nullptr) timers_->stop(part_);
  }
  TimedPart(const TimedPart&) = delete;
  TimedPart& operator=(const TimedPart&) = delete;

 private:
  StepTimers* timers_;
  StepPart part_;
};

}  // namespace megashard
