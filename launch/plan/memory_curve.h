#pragma once

#include <functional>
#include <vector>

#include "framework/training/operator_watch.h"
#include "launch/plan/planned_run.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// Samples the memory in use after each operator of a plan. While it exists, it takes the plan's totals incrementally.
class MemoryCurve {
 public:
  /// `in_use` returns the current memory. Create and destroy it on the training thread.
  MemoryCurve(const DevicePlan& plan, std::function<PeakMemory()> in_use);

  /// Totals since the last call, with all samples of that time; consecutive samples differ.
  PlanTotals take_totals(std::vector<MemorySample>& samples);

 private:
  void look();
  void take_new_totals();

  DevicePlan plan_;
  std::function<PeakMemory()> in_use_;
  PlanTotals totals_;
  double now_ = 0;  // end of the compute stream's last operation
  std::vector<MemorySample> samples_;
  OperatorWatch watch_;
};

}  // namespace megashard
