#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// What a rank's host knows of a step.
struct HostNumbers {
  double stop_request = 0;
  double save_failed = 0;          ///< 1: the one under way
  double time_is_up = 0;           ///< 1: of --exit-duration-in-mins
  std::vector<double> measures{};  ///< measured_metrics()
};

/// All that one rank has to say of one step.
struct RankNumbers {
  double weighted_loss = 0, tokens = 0;  ///< sums over its share
  double grad_norm = 0;
  double loss_scale = 1;                ///< after the step
  std::vector<double> router_losses{};  ///< of its microbatches, by router_losses.h; empty: there are none
  HostNumbers host;
};
using StepOfRanks = std::vector<RankNumbers>;  // by rank

/// The numbers of steps, on their way from all ranks' devices to all ranks' hosts: kept on the
/// device until the host wants them, then exchanged and copied all at once. Nothing but
/// finish_read() waits. Every rank calls the same in the same order.
class StepNumbers {
 public:
  StepNumbers(ProcessGroupPtr group, c10::Device device);

  /// `of_device`: loss, tokens, norm, scale and losses of routers as in RankNumbers, fp64 on the device; as many in
  /// each step.
  void add(const at::Tensor& of_device, const HostNumbers& of_host);
  bool empty() const { return steps_.empty(); }
  /// Enqueues the exchange and the copy of all steps that were added: what is enqueued behind it
  /// goes on while the host reads. Collective.
  void start_read();
  /// The steps in their order; begins to read where start_read() was not called.
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
