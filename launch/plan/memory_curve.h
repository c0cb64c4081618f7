#pragma once

#include <functional>
#include <vector>

#include "framework/training/operator_watch.h"
#include "launch/plan/planned_run.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// Looks, after each operator of a plan, at what is in use. While it lives it takes the plan's totals, bit by bit.
class MemoryCurve {
 public:
  /// `in_use`: of now. The thread that calls it trains, and destroys it.
  MemoryCurve(const DevicePlan& plan, std::function<PeakMemory()> in_use);

  /// Since the last question, with all samples of that time; each differs from the one before.
  PlanTotals take_totals(std::vector<MemorySample>& samples);

 private:
  void look();
  void take_new_totals();

  DevicePlan plan_;
  std::function<PeakMemory()> in_use_;
  PlanTotals totals_;
  double now_ = 0;  // when the last operation of the stream that computes is over
  std::vector<MemorySample> samples_;
  OperatorWatch watch_;
};

}  // namespace megashard
