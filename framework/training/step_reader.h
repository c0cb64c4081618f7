#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/training/metrics.h"
#include "framework/training/step_stats.h"

namespace megashard {

/// Statistics of steps, read back from the device when they are needed: summaries, sums over an interval, and requests.
class StepReader {
 public:
  enum class NotFinite { kLoss, kNorm };
  /// Throws an error with `what`, where it comes from, and the remedy.
  using Fail = std::function<void(const std::string& what, NotFinite which, const std::string& remedy)>;

  /// Requests of all ranks, in the steps that were read since the loop last acted on them.
  struct Merged {
    StopRequest stop = StopRequest::kNone;
    Requests requests{};
  };

  /// `is_scaled`: losses are scaled. `fail`: called for a NaN or Inf value if --check-for-nan-in-loss-and-grad is on.
  StepReader(const Arguments& arguments, ProcessGroupPtr world, c10::Device device, bool is_scaled, DiagnosticSink sink,
             Fail fail);

  /// Adds a step of `batch` samples. `names`: TrainStep::metric_names.
  void add(const DeviceStats& of_device, const HostStats& of_host, const std::vector<std::string>& names,
           int64_t batch);
  bool empty() const { return stats_.empty(); }
  void start_read() { stats_.start_read(); }
  /// Reads the added steps. Calls `learnt` with the samples of each one that was not skipped. Blocks the host for the
  /// device. Collective.
  void read(const std::function<void(int64_t samples)>& learnt);
  /// Merges the requests of the only rank, without its device.
  void merge(const HostStats& of_rank);
  Merged take_merged();
  /// Calls `fail` if the loss is NaN or Inf.
  StepSummary summarise(const StepOfRanks& step) const;

  const StepSummary& last() const { return last_; }
  const std::vector<std::string>& metric_names() const { return names_; }
  /// Sums since the last log line; the caller resets them.
  StepInterval& interval() { return interval_; }
  /// Warns at the end of a run of steps without a label to learn.
  void warn_of_unlearnt_steps() const;

 private:
  void add_to_interval(const StepSummary& step, int64_t samples);

  const Arguments& arguments_;
  size_t rank_;
  bool is_scaled_;
  DiagnosticSink sink_;
  Fail fail_;
  StepStats stats_;
  std::vector<int64_t> batches_;               // number of samples of each step in stats_
  std::vector<std::string> names_{"lm loss"};  // names of the metrics in stats_
  StepSummary last_;
  StepInterval interval_;
  Merged merged_;
  int64_t steps_ = 0, unlearnt_steps_ = 0;  // read in this run; unlearnt: every label is masked
};

}  // namespace megashard
