#pragma once

#include <string>

#include "launch/plan/planned_run.h"

namespace megashard {

/// Writes the planned step in Chrome's trace format (chrome://tracing, Perfetto): a row for each stream and a counter
/// of the memory by class, in bytes.
void write_plan_trace(const std::string& path, const PlannedRun& run);

}  // namespace megashard
