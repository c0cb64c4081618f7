#pragma once

#include <string>
#include <vector>

#include "launch/report/reported_run.h"

namespace megashard {

/// Tables of the runs' arguments: those that differ between runs, and all that differ from their defaults.
std::string configuration_section(const std::vector<ReportedRun>& runs);

}  // namespace megashard
