#pragma once

#include <string>

#include "launch/report/reported_trace.h"

namespace megashard {

/// An <svg> of the trace: a row for each stream or thread, what computes and what communicates in the page's colours.
/// Spans that are closer than can be seen are one rectangle, which tells the longest of them.
std::string drawing_of(const ReportedTrace& trace);

}  // namespace megashard
