#pragma once

#include "launch/plan/planned_run.h"

namespace megashard {

/// Prints what `megashard plan` found: memory, time, communication, checkpoint.
void print_plan(const PlannedRun& run, const DeviceModel& device);

}  // namespace megashard
