#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "framework/arguments/logging_arguments.h"
#include "framework/diagnostics.h"
#include "framework/training/listener.h"
#include "framework/training/run_events.h"

namespace megashard {

/// A file of the first rank that metrics go to.
class MetricsWriter {
 public:
  virtual ~MetricsWriter() = default;
  /// Throws std::runtime_error when it could not be written (a full disk).
  virtual void write(const StepReport& report) = 0;
};

/// The files of a run on its first rank: --metrics-file with its events, --prometheus-file and --tensorboard-dir. A
/// failed write does not end training; the first one is reported.
class MetricsFiles : public Listener {
 public:
  /// `log` must outlive this.
  MetricsFiles(const LoggingArguments& log, DiagnosticSink sink);
  /// Opens them for the steps after `progress`, and writes the event "start". The steps of another run in
  /// --metrics-file are kept under another name, which `print` gets. Throws UsageError for a file that cannot be
  /// written. Collective.
  void open(const Arguments& arguments, const Progress& progress, const ProcessGroupPtr& world,
            const std::function<void(const std::string& line)>& print);
  RunEvents& events() { return events_; }  ///< open on the first rank with --metrics-file
  bool reads(int64_t step) const override;
  void step_complete(const StepReport& step, const Requests& merged) override;
  void training_ended(TrainingEnd how, int64_t step) override;

 private:
  void open_writers(int64_t loaded_step);

  const LoggingArguments& log_;
  DiagnosticSink sink_;
  std::vector<std::unique_ptr<MetricsWriter>> writers_;
  RunEvents events_;
  bool has_reported_failure_ = false;
};

}  // namespace megashard
