#pragma once

#include <string>
#include <vector>

#include "launch/report/line_chart.h"
#include "launch/report/reported_run.h"

namespace megashard {

/// One chart per metric, the best known first; training and validation loss share one. Constant counts are omitted.
std::vector<LineChart> charts_of(const std::vector<ReportedRun>& runs);

/// Tables of the runs' arguments: those that differ between runs, and all that differ from their defaults.
std::string configuration_section(const std::vector<ReportedRun>& runs);

}  // namespace megashard
