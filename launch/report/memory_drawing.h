#pragma once

#include <string>

#include "launch/report/reported_trace.h"

namespace megashard {

/// An <svg> of the trace's memory on the time axis of its drawing_of: stacked classes in the page's colours, by index.
/// Moments too close to distinguish are drawn as their maximum. Empty if the trace has no memory.
std::string memory_drawing_of(const ReportedTrace& trace);

/// Maximum of the memory in bytes.
double fullest_bytes(const ReportedTrace& trace);

}  // namespace megashard
