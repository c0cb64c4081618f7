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

/// Memory in use at its peak, in bytes; on a CPU, resident memory.
struct PeakMemory {
  int64_t bytes = 0;
  int64_t program = 0, kept = 0;  ///< on a CPU: program and libraries; free blocks of the buffer pool
  int64_t parameters = 0, gradients = 0, optimizer = 0, unsharded = 0, communication = 0;
  int64_t rest() const {
    return bytes - program - kept - parameters - gradients - optimizer - unsharded - communication;
  }
  /// By class, with the names of --log-memory; includes `program` if it is not 0.
  std::vector<std::pair<std::string, int64_t>> parts() const;
  std::string moment{};     ///< "step 2, after pre_backward of model.layers.30"
  std::string operation{};  ///< operation that allocated the last part
};

/// Memory in use from a time on, on the clock of PlannedSpan.
struct MemorySample {
  double at = 0;
  PeakMemory memory{};
};

struct PlannedRun {
  int64_t world_size = 1, parameters = 0;
  int64_t tokens = 0;     ///< per step, all ranks
  double flops = 0;       ///< per step, all ranks, counted as in Megatron
  double peak_flops = 0;  ///< of one device, in the model's compute dtype
  PeakMemory peak{};
  PlanTotals step{};                   ///< last step
  std::vector<MemorySample> memory{};  ///< during that step, if spans are kept
  int64_t host_bytes = 0;              ///< sharded parameters, gradients and optimizer state with CPU offload
  int64_t checkpoint_bytes = 0;
  std::vector<UnitSummary> units{};
};

/// Differences from the command line and its FSDP2 file.
struct PlanChange {
  std::optional<int64_t> micro_batch_size{};
  bool recomputes = false;  ///< all layers, fully
  std::optional<bool> reshard_after_forward{};
  std::optional<int> sharding_size{};
  bool offloads = false;  ///< CPU offload of parameters, gradients and optimizer state
};

struct PlanOptions {
  DeviceModel device;
  int world_size = 1;
  bool keeps_spans = false;
  DiagnosticSink sink;
  PlanChange change{};
};

/// Trains as the command line says, as rank 0, for a few steps with generated tokens. Throws UsageError for flags that
/// cannot be planned. Only one call at a time per process.
PlannedRun run_planned(const CommandLine& line, const PlanOptions& options);

inline constexpr const char* kDefaultDevice = "h200";

/// A line that names the device of the plan if `flag` is not given.
std::string default_device_line(const std::string& flag);

/// The value of --world-size; 1 by default.
int read_world_size(CommandLine& line);

}  // namespace megashard
