#pragma once

#include <string>

#include "launch/report/reported_trace.h"

namespace megashard {

/// An <svg> of the trace's memory over the time of its drawing_of: the classes upon each other, in the page's colours
/// by their numbers. Of what is too near to be seen the fullest moment is drawn. Empty: it has none.
std::string memory_drawing_of(const ReportedTrace& trace);

/// The bytes of its fullest moment.
double fullest_bytes(const ReportedTrace& trace);

}  // namespace megashard
