#pragma once

#include <string>

namespace megashard::sim {

/// Notes the profiler's scopes of the user's kind ("FSDP::all_gather layers.0"), so that findings
/// can name the unit at work.
void watch_unit_scopes();

/// Of the calling thread; empty: none.
const std::string& current_unit();

}  // namespace megashard::sim
