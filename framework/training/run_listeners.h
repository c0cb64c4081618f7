#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "framework/diagnostics.h"
#include "framework/training/listener.h"
#include "framework/training/memory_log.h"
#include "framework/training/metrics_writer.h"
#include "framework/training/run_events.h"
#include "framework/training/step_profile.h"
#include "framework/training/step_timers.h"

namespace megashard {

/// The listeners that flags ask for. Lines are printed on the first rank.
using PrintLine = std::function<void(const std::string& line)>;

/// Evaluations, saves and exits at the steps of --eval-interval, --save-interval and --exit-interval, and the exit of
/// --exit-duration-in-mins.
class DueSteps : public Listener {
 public:
  /// `start`: of the program on the first rank, whose clock decides.
  DueSteps(const Arguments& arguments, bool is_first_rank, std::chrono::steady_clock::time_point start);
  bool reads(int64_t step) const override;
  Requests requests(int64_t step) override;

 private:
  const Arguments& arguments_;
  bool is_first_rank_;
  std::chrono::steady_clock::time_point start_;
};

/// Megatron's log line and its timers.
class LogLines : public Listener {
 public:
  /// `timers`: null without --timing-log-level.
  LogLines(StepTimers* timers, PrintLine print);
  void step_ended(const StepReport& step) override;

 private:
  StepTimers* timers_;
  PrintLine print_;
};

/// --metrics-file, --prometheus-file and --tensorboard-dir. A failed write does not end training; the first one is
/// reported.
class MetricsFiles : public Listener {
 public:
  MetricsFiles(const Arguments& arguments, DiagnosticSink sink);
  /// Called on the first rank only, before the first step.
  void open(MetricsWriters writers) { writers_ = std::move(writers); }
  bool reads(int64_t step) const override;
  void step_complete(const StepReport& step, const Requests& merged) override;

 private:
  const Arguments& arguments_;
  MetricsWriters writers_;
  DiagnosticSink sink_;
  bool has_reported_failure_ = false;
};

/// --log-memory: a line for each new peak.
class MemoryLines : public Listener {
 public:
  MemoryLines(std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print);
  void weights_updated(int64_t step) override;

 private:
  std::shared_ptr<MemoryLog> memory_;
  RunEvents& events_;
  PrintLine print_;
};

/// --profile, on a rank of --profile-ranks.
class Profiler : public Listener {
 public:
  /// `memory`: null without --log-memory.
  Profiler(const Arguments& arguments, const ProcessGroup& world, c10::Device device, std::shared_ptr<MemoryLog> memory,
           RunEvents& events, PrintLine print);
  void step_starts(int64_t step) override;
  void weights_updated(int64_t step) override;
  void steps_ended(int64_t step) override;

 private:
  void log(const std::string& path, int64_t step);

  std::shared_ptr<MemoryLog> memory_;
  StepProfile profile_;
  RunEvents& events_;
  PrintLine print_;
};

}  // namespace megashard
