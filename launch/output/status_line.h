#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "framework/training/listener.h"
#include "framework/training/progress.h"
#include "launch/output/terminal.h"

namespace megashard {

/// "step 120/1000  ETA 5 min  loss 4.089  12.3k tokens/s  MFU 41.2 %  12.0 GiB  data 0.1 ms", cut to the terminal's
/// columns. `step_seconds` is the expected time of future steps. Values missing from the report are omitted.
std::string status_text(const StepReport& report, double step_seconds, const Terminal& terminal);

/// Prints one or more lines on standard output, over a status line if there is one. Used by every rank.
void print_over_status(const std::string& line);

/// Bottom line of a terminal about the last step, rewritten a few times a second. For rank 0.
class StatusLine : public Listener {
 public:
  explicit StatusLine(std::chrono::milliseconds interval = std::chrono::milliseconds(200));
  ~StatusLine() override { clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  /// Does nothing if standard output is not a terminal.
  void step_complete(const StepReport& report, const Requests& merged) override;
  void clear();

 private:
  ProgressClock clock_;
  std::optional<double> step_seconds_;  // smoothed
  bool is_shown_ = false;
};

}  // namespace megashard
