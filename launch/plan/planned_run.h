#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/diagnostics.h"
#include "launch/arguments/command_line.h"
#include "parallel/device/device_plan.h"
#include "parallel/fsdp/unit_summary.h"

namespace megashard {

/// What was in use, of a CPU what was resident, when most was, in bytes.
struct PeakMemory {
  int64_t bytes = 0;
  int64_t program = 0, kept = 0;  ///< of a CPU: the program and its libraries, and free blocks of the buffer pool
  int64_t parameters = 0, gradients = 0, optimizer = 0, unsharded = 0, communication = 0;
  int64_t rest() const {
    return bytes - program - kept - parameters - gradients - optimizer - unsharded - communication;
  }
  /// By class, as --log-memory names them; with `program` if there is one.
  std::vector<std::pair<std::string, int64_t>> parts() const;
  std::string moment{};     ///< "step 2, after pre_backward of model.layers.30"
  std::string operation{};  ///< that asked for the last of it
};

/// What was in use from a time on, of the clock of PlannedSpan.
struct MemorySample {
  double at = 0;
  PeakMemory memory{};
};

struct PlannedRun {
  int64_t world_size = 1, parameters = 0;
  int64_t tokens = 0;     ///< of a step, of all ranks
  double flops = 0;       ///< of a step, of all ranks, as Megatron counts them
  double peak_flops = 0;  ///< of one device, in the dtype that the model computes in
  PeakMemory peak{};
  PlanTotals step{};                   ///< the last one
  std::vector<MemorySample> memory{};  ///< over that step, where spans are kept
  int64_t host_bytes = 0;              ///< of rows, gradients and moments that CPU offload keeps there
  int64_t checkpoint_bytes = 0;
  std::vector<UnitSummary> units{};
};

/// What is done otherwise than the line and its FSDP2 file say.
struct PlanChange {
  std::optional<int64_t> micro_batch_size{};
  bool recomputes = false;  ///< each layer, whole
  std::optional<bool> reshard_after_forward{};
  std::optional<int> sharding_size{};
  bool offloads = false;  ///< rows, gradients and optimizer state to host memory
};

struct PlanOptions {
  DeviceModel device;
  int world_size = 1;
  bool keeps_spans = false;
  DiagnosticSink sink;
  PlanChange change{};
};

/// Trains as the line says, as rank 0, for a few steps of generated tokens. Throws UsageError for flags
/// that a plan cannot go through. Fills the line's arguments; one at a time in a process.
PlannedRun run_planned(CommandLine& line, const PlanOptions& options);

}  // namespace megashard
