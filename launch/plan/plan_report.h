#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "launch/plan/planned_run.h"

namespace megashard {

/// Prints the result of `megashard plan`: memory, time, communication, checkpoint.
void print_plan(const PlannedRun& run, const DeviceModel& device);
/// The same figures, in bytes and seconds.
nlohmann::ordered_json plan_json(const PlannedRun& run, const DeviceModel& device);

/// Fraction of the peak FLOP/s that the step reaches (MFU).
double utilisation(const PlannedRun& run);
/// Formats one number with printf.
std::string decimal(const char* format, double value);

}  // namespace megashard
