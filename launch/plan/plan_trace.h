#pragma once

#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard {

/// Writes a planned step in Chrome's trace format (chrome://tracing, Perfetto): a row for each stream.
void write_plan_trace(const std::string& path, const std::vector<PlannedSpan>& spans);

}  // namespace megashard
