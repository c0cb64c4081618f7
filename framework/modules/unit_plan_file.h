#pragma once

#include <string>

#include "parallel/fsdp/unit_plan.h"

namespace megashard {

/// The file of --fsdp2-plan: `units`, a list whose entries are a module's path or a list of paths, and
/// num_to_forward_prefetch and num_to_backward_prefetch. Throws UsageError with file, line, key and value.
UnitPlan load_unit_plan(const std::string& path);
UnitPlan parse_unit_plan(const std::string& text, const std::string& source);

/// What load_unit_plan reads as the same plan.
std::string unit_plan_text(const UnitPlan& plan);

}  // namespace megashard
