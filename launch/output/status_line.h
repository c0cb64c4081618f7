#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "framework/training/metrics.h"
#include "framework/training/progress_clock.h"
#include "launch/output/terminal.h"

namespace megashard {

/// "step 120/1000  ETA 5 min  loss 4.089  12.3k tokens/s  MFU 41.2 %  12.0 GiB  data 0.1 ms", cut to the terminal's
/// columns. `step_seconds`: what a step to come will take. Numbers that the report lacks are left out.
std::string status_text(const StepReport& report, double step_seconds, const Terminal& terminal);

/// A line, or several, on standard output, over a status line that may stand there. Every rank prints so.
void print_over_status(const std::string& line);

/// A line at the bottom of a terminal that tells the last step and is written again, a few times a second. For rank 0.
class StatusLine {
 public:
  explicit StatusLine(std::chrono::milliseconds interval = std::chrono::milliseconds(200));
  ~StatusLine() { clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// After a step. Nothing where standard output is no terminal.
  void show(const StepReport& report);
  void clear();

 private:
  ProgressClock clock_;
  std::optional<double> step_seconds_;  // of late
  bool is_shown_ = false;
};

}  // namespace megashard
