#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/training/listener.h"
#include "framework/training/memory_log.h"
#include "framework/training/run_events.h"
#include "framework/training/step_profile.h"

namespace megashard {

/// The listeners that flags ask for. Lines are printed on the first rank.
using PrintLine = std::function<void(const std::string& line)>;

struct DueOptions {
  std::optional<int64_t> save_interval{}, eval_interval{}, exit_interval{};
  std::optional<int64_t> exit_minutes{};  ///< since the program's start
  bool exits_by_signal = false;           ///< asks for it at each step
};
DueOptions due_options(const Arguments& arguments);

/// Evaluations, saves and exits at the steps of --eval-interval, --save-interval and --exit-interval, and the exit of
/// --exit-duration-in-mins.
class DueSteps : public Listener {
 public:
  /// `start`: of the program on the first rank, whose clock decides.
  DueSteps(const DueOptions& options, bool is_first_rank, std::chrono::steady_clock::time_point start);
  bool reads(int64_t step) const override;
  Requests requests(int64_t step) override;

 private:
  DueOptions options_;
  bool is_first_rank_;
  std::chrono::steady_clock::time_point start_;
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
  Profiler(const LoggingArguments& log, const ProcessGroup& world, c10::Device device,
           std::shared_ptr<MemoryLog> memory, RunEvents& events, PrintLine print);
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
