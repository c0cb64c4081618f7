#pragma once

#include <string>

#include "launch/report/reported_trace.h"

namespace megashard {

/// An <svg> of the trace: a row for each stream or thread, what computes and what communicates in the page's colours.
/// Spans that are closer than can be seen are one rectangle, which tells the longest of them.
std::string drawing_of(const ReportedTrace& trace);

inline constexpr double kTraceLeft = 110, kTraceWidth = 1000, kTraceAxisHeight = 22;

/// Where a time is drawn.
double trace_x(const ReportedTrace& trace, double seconds);
/// The times along the x axis, with lines up to y 0, of a drawing of this height.
std::string time_axis(const ReportedTrace& trace, double height);

}  // namespace megashard
