#pragma once

#include <string>

#include "parallel/fsdp/unit_plan.h"

namespace megashard {

/// Reads the file of --fsdp2-plan: `units`, a list of module paths or lists of paths, num_to_forward_prefetch and
/// num_to_backward_prefetch. Throws UsageError with file, line, key and value.
UnitPlan load_unit_plan(const std::string& path);
UnitPlan parse_unit_plan(const std::string& text, const std::string& source);

/// Formats a plan for load_unit_plan.
std::string unit_plan_text(const UnitPlan& plan);

}  // namespace megashard
