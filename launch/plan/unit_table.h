#pragma once

#include <vector>

#include "parallel/fsdp/unit_summary.h"

namespace megashard {

/// Prints the units of a model; equal ones of one pattern share a row.
void print_units(const std::vector<UnitSummary>& units);

}  // namespace megashard
