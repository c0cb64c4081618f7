#pragma once

#include <string>
#include <vector>

#include "launch/report/reported_run.h"

namespace megashard {

/// Tables of the arguments of runs: those that differ between the runs, and all that are not at their defaults.
std::string configuration_section(const std::vector<ReportedRun>& runs);

}  // namespace megashard
