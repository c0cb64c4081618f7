#pragma once

#include <cstdint>
#include <vector>

#include "parallel/fsdp/unit_plan.h"
#include "parallel/fsdp/unit_trace.h"

namespace megashard {

/// What a collective over the shard group costs: latency + bytes of the whole / bandwidth. Seconds, bytes a second.
struct LinkCosts {
  double gather_latency = 0, gather_bandwidth = 1;
  double reduce_latency = 0, reduce_bandwidth = 1;
};

/// One step: what its units are, and what happened in which order, each alone.
struct StepTrace {
  std::vector<UnitTrace::Unit> units;
  std::vector<UnitTrace::Event> events;
};

/// Bandwidths that explain the traced times, once the latencies are taken off.
LinkCosts link_costs(const StepTrace& trace, double gather_latency, double reduce_latency);

struct PlanForecast {
  double seconds = 0;         ///< of forward and backward
  double exposed = 0;         ///< of them, compute waits for communication
  int64_t gathered_peak = 0;  ///< bytes: whole parameters, and gradients that wait for their reduction
};

/// The traced step under another plan: computing and communicating go on beside each other, one gather or reduction at
/// a time. `host_runs_ahead`: gathers start before the host waits for what precedes them (GPUs), so one unit is always
/// prefetched. A unit that the plan splits computes in each part for the share of its forward that was seen there.
PlanForecast forecast_plan(const StepTrace& trace, const LinkCosts& link, const UnitPlan& plan, bool host_runs_ahead);

/// The plan with the shortest forecast that takes at most `more_bytes` beyond what `present` takes; of those within 1%
/// of it the one that takes least; `present` itself where nothing is 1% better. Looks at neighbours merged by 2, 3, 4,
/// 6, 8, ..., at units split into their parts, and at prefetch of 0 to 2.
UnitPlan search_plan(const StepTrace& trace, const LinkCosts& link, const UnitPlan& present, int64_t more_bytes,
                     bool host_runs_ahead);

}  // namespace megashard
