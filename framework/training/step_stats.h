#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <string>
#include <vector>

#include "framework/training/listener.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// What TrainStep knows of a step, of this rank's share: fp64 on the device.
struct DeviceStats {
  at::Tensor grad_norm;   ///< scalar, before clipping; the same on all ranks
  at::Tensor loss_scale;  ///< scalar, of the next step; 1 without a scaler; the same on all ranks
  at::Tensor sums;        ///< [2 * metrics]: sum and count of each, in the order of TrainStep::metric_names
};

/// What the host of a rank adds.
struct HostStats {
  StopRequest stop_request = StopRequest::kNone;
  Requests requests{};
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

}  // namespace megashard
