#pragma once

#include <string>

namespace megashard::sim {

/// Records the profiler's user scopes ("FSDP::all_gather (layers.0)"), so that findings can name the current unit.
void watch_unit_scopes();

/// Unit of the calling thread; empty: none.
const std::string& current_unit();

}  // namespace megashard::sim
