#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "checkpoint/files/work_progress.h"
#include "framework/training/progress.h"

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

}  // namespace megashard
