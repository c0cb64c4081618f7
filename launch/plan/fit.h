#pragma once

#include <string>
#include <vector>

#include "launch/plan/planned_run.h"

namespace megashard {

/// One way to run a training, with its plan.
struct FitTrial {
  PlanChange change;
  PlannedRun run;
};

/// Plans micro batch sizes (powers of two), recompute, resharding after forward, and sharding within a node, where the
/// command line leaves them open. If none fits, plans them with CPU offload of parameters, gradients and optimizer
/// state. Sorted by speed, those that do not fit
/// last.
std::vector<FitTrial> try_what_fits(const CommandLine& line, const PlanOptions& options);

/// Flags, then keys of the FSDP2 file after a semicolon: "--micro-batch-size 2; sharding_size: 8".
std::string change_text(const PlanChange& change);

/// Prints the trials as a table.
void print_trials(const std::vector<FitTrial>& trials, const DeviceModel& device);

}  // namespace megashard
