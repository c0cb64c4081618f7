#pragma once

#include <vector>

#include "parallel/fsdp/unit_summary.h"

namespace megashard {

/// Prints the units of a model: those of a pattern that are alike in one row.
void print_units(const std::vector<UnitSummary>& units);

}  // namespace megashard
