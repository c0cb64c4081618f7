#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/report/reported_run.h"
#include "launch/report/reported_trace.h"

namespace megashard {

/// Beginning of every page.
inline constexpr std::string_view kReportMark = "<!doctype html><!-- megashard report -->";

struct Report {
  std::string written{};  ///< time of creation
  std::vector<ReportedRun> runs{};
  std::vector<ReportedTrace> traces{};
};

/// A self-contained HTML page for light and dark, narrow and wide screens.
std::string report_page(const Report& report);

}  // namespace megashard
