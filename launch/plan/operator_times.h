#pragma once

#include "launch/plan/stopwatch.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// Shares of the products' rates that causal attention reaches, as device files have them.
void measure_attention(DeviceModel& model, const Stopwatch& watch, c10::Device device);

/// Bytes a second of what models and optimizers do between their products on a CPU, by the names that the operators
/// have in a plan.
void measure_operators(DeviceModel& model, const Stopwatch& watch);

}  // namespace megashard
