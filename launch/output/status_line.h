#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "checkpoint/files/work_progress.h"
#include "framework/training/listener.h"
#include "framework/training/progress_clock.h"
#include "launch/output/terminal.h"

namespace megashard {

/// "load: 12.30 GiB of 60.10 GiB, 20.5 %, 1.20 GiB/s, 39.8 s left" after `seconds` of work.
std::string progress_text(const WorkProgress& progress, double seconds);

/// Shows the progress of this thread's long operations: on a terminal in a bottom line that is rewritten a few times a
/// second and removed at the end, otherwise with an occasional log line. For the first rank.
class ProgressLine {
 public:
  struct Intervals {
    std::chrono::milliseconds terminal{200};
    std::chrono::milliseconds log = std::chrono::seconds(30);
  };
  /// `say` receives log lines.
  explicit ProgressLine(std::function<void(const std::string& line)> say) : ProgressLine(std::move(say), Intervals()) {}
  ProgressLine(std::function<void(const std::string& line)> say, Intervals intervals);

 private:
  using Clock = std::chrono::steady_clock;
  void show(const WorkProgress& progress);

  const std::function<void(const std::string& line)> say_;
  const Intervals intervals_;
  std::mutex mutex_;                    // operations may run in several threads
  std::optional<ProgressClock> clock_;  // of the current operation; null: none
  Clock::time_point begin_;
  bool has_terminal_ = false;
  WorkWatch watch_;  // last: it calls show()
};

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
