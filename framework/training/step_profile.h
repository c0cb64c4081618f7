#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "framework/arguments/logging_arguments.h"
#include "framework/training/memory_log.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// --profile: what this rank's operators, kernels and FSDP units do from behind step --profile-step-start to
/// --profile-step-end, by LibTorch's profiler (Kineto), as a Chrome trace: chrome://tracing and Perfetto show it.
class StepProfile {
 public:
  /// Of one of --profile-ranks. With a `memory`, which outlives it, the trace has memory by class, too.
  StepProfile(const LoggingArguments& log, const ProcessGroup& world, c10::Device device, const MemoryLog* memory);
  /// A profile under way ends without a file.
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Before the step behind `completed` ones.
  void begin_step(int64_t completed);
  /// Behind it. The path of the trace where this was the last one; else empty.
  std::string end_step(int64_t completed);
  /// The same where training ends earlier.
  std::string finish();

 private:
  int64_t first_, last_;
  c10::Device device_;
  std::string path_;
  const MemoryLog* memory_;
  std::unique_ptr<MemoryCounters> counters_;  // while it runs
  bool runs_ = false;
};

}  // namespace megashard
