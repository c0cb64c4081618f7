#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/report/reported_run.h"
#include "launch/report/reported_trace.h"

namespace megashard {

/// With which every page begins.
inline constexpr std::string_view kReportMark = "<!doctype html><!-- megashard report -->";

struct Report {
  std::string written{};  ///< the time
  std::vector<ReportedRun> runs{};
  std::vector<ReportedTrace> traces{};
};

/// One HTML page that needs nothing from elsewhere, for light and dark screens, narrow and wide ones.
std::string report_page(const Report& report);

}  // namespace megashard
