#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"
#include "framework/training/listener.h"
#include "framework/training/metrics.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Statistics of a step from this rank's share of the batch: fp64 on the device.
struct DeviceStats {
  at::Tensor grad_norm;   ///< scalar, before clipping; the same on all ranks
  at::Tensor loss_scale;  ///< scalar, of the next step; 1 without a scaler; the same on all ranks
  at::Tensor sums;        ///< [2 * metrics]: sum and count of each, in the order of TrainStep::metric_names
};

/// Statistics of a step from this rank's host.
struct HostStats {
  StopRequest stop_request = StopRequest::kNone;
  Requests requests{};
  double saved_flops = 0;          ///< DocumentFlops; the sum over the ranks is that of the global batch
  std::vector<double> measures{};  ///< measured_metrics()
};

/// The statistics of one rank for one step.
struct RankStats {
  double grad_norm = 0;
  double loss_scale = 1;  ///< after the step
  /// Over the rank's share of the batch, in the order of TrainStep::metric_names; the first one is the loss.
  struct Mean {
    double sum = 0, count = 0;
  };
  std::vector<Mean> metrics{};
  HostStats host;
};
using StepOfRanks = std::vector<RankStats>;  // by rank

/// Asynchronous read-back of step statistics: they stay on the device until the host reads them, and are then
/// exchanged and copied all at once. All ranks make the same calls in the same order.
class StepStats {
 public:
  StepStats(ProcessGroupPtr group, c10::Device device);

  /// Adds a step; all steps have as many metrics.
  void add(const DeviceStats& of_device, const HostStats& of_host);
  bool empty() const { return steps_.empty(); }
  /// Enqueues the exchange and the copy of all added steps; work enqueued after it goes on while the host reads.
  /// Collective.
  void start_read();
  /// The steps in order; calls start_read() if it was not called. Blocks the host until the copy is there.
  std::vector<StepOfRanks> finish_read();

 private:
  ProcessGroupPtr group_;
  c10::Device device_;
  size_t of_device_ = 0;           // numbers of a step
  std::vector<at::Tensor> steps_;  // each [numbers of a rank] on the device
  at::Tensor copy_;                // [ranks, steps, numbers of a rank] in host memory; undefined: not begun
  std::optional<c10::Event> copied_;
};

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

  struct Options {
    int64_t tensor_parallel_size = 1;  ///< neighbours that have the same tokens
    bool is_scaled = false;            ///< losses are scaled
    DiagnosticSink sink{};
    Fail fail{};  ///< called for a NaN or Inf value; null: training goes on
  };
  StepReader(ProcessGroupPtr world, c10::Device device, Options options);

  /// Adds a step of `batch` samples. `names`: TrainStep::metric_names.
  void add(const DeviceStats& of_device, const HostStats& of_host, const std::vector<std::string>& names,
           int64_t batch);
  bool empty() const { return stats_.empty(); }
  void start_read() { stats_.start_read(); }
  /// Reads the added steps. Calls `visit` with each one and its samples, in order. Blocks the host for the device.
  /// Collective.
  void read(const std::function<void(const StepSummary& step, int64_t samples)>& visit);
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

  size_t rank_;
  Options options_;
  StepStats stats_;
  std::vector<int64_t> batches_;               // number of samples of each step in stats_
  std::vector<std::string> names_{"lm loss"};  // names of the metrics in stats_
  StepSummary last_;
  StepInterval interval_;
  Merged merged_;
  int64_t steps_ = 0, unlearnt_steps_ = 0;  // read in this run; unlearnt: every label is masked
};

}  // namespace megashard
