#pragma once

#include <cstdint>
#include <string>

#include "launch/arguments/command_line.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// What was in use when most was, in bytes.
struct PeakMemory {
  int64_t bytes = 0;
  int64_t parameters = 0, gradients = 0, optimizer = 0, unsharded = 0, communication = 0;
  int64_t rest() const { return bytes - parameters - gradients - optimizer - unsharded - communication; }
  std::string moment;     ///< "step 2, after pre_backward of model.layers.30"
  std::string operation;  ///< that asked for the last of it
};

struct PlannedRun {
  int64_t world_size = 1, parameters = 0;
  int64_t tokens = 0;     ///< of a step, of all ranks
  double flops = 0;       ///< of a step, of all ranks, as Megatron counts them
  double peak_flops = 0;  ///< of one device, in the dtype that the model computes in
  PeakMemory peak{};
  PlanTotals step{};  ///< the last one
  int64_t checkpoint_bytes = 0;
};

/// Trains as the line says on `device`, as rank 0 of `world_size`, for a few steps of generated
/// tokens. Throws UsageError for flags that a plan cannot go through. Once in a process.
PlannedRun run_planned(CommandLine& line, const DeviceModel& device, int world_size, bool keeps_spans);

}  // namespace megashard
