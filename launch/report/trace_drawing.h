#pragma once

#include <string>

#include "launch/report/reported_trace.h"

namespace megashard {

/// An <svg> of the trace: a row per stream or thread, computation and communication in the page's colours. Spans too
/// close to distinguish become one rectangle that names the longest.
std::string drawing_of(const ReportedTrace& trace);

inline constexpr double kTraceLeft = 110, kTraceWidth = 1000, kTraceAxisHeight = 22;

/// x coordinate of a time.
double trace_x(const ReportedTrace& trace, double seconds);
/// Labels of the time axis, with lines up to y 0, for a drawing of this height.
std::string time_axis(const ReportedTrace& trace, double height);

/// An <svg> of the trace's memory on the time axis of its drawing_of: stacked classes in the page's colours, by index.
/// Moments too close to distinguish are drawn as their maximum. Empty if the trace has no memory.
std::string memory_drawing_of(const ReportedTrace& trace);

/// Maximum of the memory in bytes.
double fullest_bytes(const ReportedTrace& trace);

}  // namespace megashard
