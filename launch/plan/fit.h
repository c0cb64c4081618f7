#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launch/plan/planned_run.h"

namespace megashard {

/// One way to run a training, and what its plan says.
struct FitTrial {
  PlanChange change;
  PlannedRun run;
};

/// Plans micro batches (powers of two), recompute, resharding after forward, and shards within a node,
/// where the line leaves them open; where none fits, the same with rows, gradients and optimizer state in host memory.
/// `line` parses it anew. Fastest first; those that do not fit last.
std::vector<FitTrial> try_what_fits(const std::function<CommandLine()>& line, const PlanOptions& options);

/// Flags, and keys of the FSDP2 file behind a semicolon: "--micro-batch-size 2; sharding_size: 8".
std::string change_text(const PlanChange& change);

/// The trials as a table.
void print_trials(const std::vector<FitTrial>& trials, const DeviceModel& device);

}  // namespace megashard
