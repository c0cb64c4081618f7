#pragma once

#include <cstdint>
#include <string>

#include "framework/training/appended_file.h"
#include "framework/training/metrics_writer.h"

namespace megashard {

/// The metrics that have a key (`log`: for_each_metric), as a JSON object on one line; doubles in the shortest form
/// that reads back equal, null for what is not finite.
std::string metrics_line(const StepReport& report, const LoggingArguments* log = nullptr);

/// The lines of a metrics file up to that step, of each step the last, as a run that goes on after
/// it leaves them. Lines that are no step's stay, but for one that was cut short at the end.
std::string lines_until(const std::string& text, int64_t step);

/// Before a fresh run writes that file: what another run has written there becomes FILE.1, or the next number that is
/// free, with its events (run_events.h). Returns the new name, empty where there was nothing. Throws UsageError when it
/// cannot be renamed.
std::string keep_earlier_metrics(const std::string& path);

/// Writes one line a step, flushed, so that a reader can follow it. For rank 0.
class MetricsFile final : public MetricsWriter {
 public:
  /// A new file, or where a run goes on after `loaded_step`, the lines up to that one. Creates
  /// missing folders. Throws UsageError when the file cannot be written.
  MetricsFile(const std::string& path, int64_t loaded_step, const LoggingArguments* log = nullptr);

  /// Throws std::runtime_error when the disk does not take the line, which is then left out.
  void write(const StepReport& report) override;

 private:
  std::string path_;
  AppendedFile file_;
  const LoggingArguments* log_;
};

}  // namespace megashard
