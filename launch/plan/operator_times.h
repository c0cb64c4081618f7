#pragma once

#include "launch/plan/stopwatch.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// Measures the share of the matrix product's FLOP/s that causal attention reaches, for device files.
void measure_attention(DeviceModel& model, const Stopwatch& watch, c10::Device device);

/// Measures the bytes per second of non-matmul operators of models and optimizers on a CPU, by their names in a plan.
void measure_operators(DeviceModel& model, const Stopwatch& watch);

}  // namespace megashard
