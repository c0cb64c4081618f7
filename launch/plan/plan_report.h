#pragma once

#include <string>

#include "launch/plan/planned_run.h"

namespace megashard {

/// Prints what `megashard plan` found: memory, time, communication, checkpoint.
void print_plan(const PlannedRun& run, const DeviceModel& device);

/// Of the peak that the step's FLOPs reach (MFU).
double utilisation(const PlannedRun& run);
/// As printf writes one number.
std::string decimal(const char* format, double value);

}  // namespace megashard
