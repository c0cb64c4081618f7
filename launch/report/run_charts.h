#pragma once

#include <vector>

#include "launch/report/line_chart.h"
#include "launch/report/reported_run.h"

namespace megashard {

/// A chart for each number of the metrics files, the best known ones first; the losses of training and validation are
/// one. Left out: counts that are the same in all steps.
std::vector<LineChart> charts_of(const std::vector<ReportedRun>& runs);

}  // namespace megashard
