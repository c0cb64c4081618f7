#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Loss scaling for fp16 compute under fully_shard (torch.amp.GradScaler): the loss is multiplied
/// by a scale so that small gradients survive fp16, and a step whose gradients overflow on any rank
/// is skipped on all.
///   scaler.scale(loss).backward();
///   scaler.unscale_(parameters);           // before clipping
///   if (scaler.finite()) optimizer.step();
///   scaler.update();
class GradScaler {
 public:
  struct Options {
    double initial_scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;  ///< steps without overflow before the scale grows
  };
  GradScaler() : GradScaler(Options{}) {}
  explicit GradScaler(const Options& options);

  double scale() const { return scale_; }
  at::Tensor scale(const at::Tensor& loss) const { return loss.mul(scale_); }

  /// Divides the gradients by the scale and looks for infinities and NaN among all ranks' shards.
  /// Collective: one all-reduce for all parameters that are sharded over the same group. Every rank
  /// passes the same parameters, each once an iteration.
  void unscale_(const std::vector<at::Tensor>& parameters);
  /// Whether the last unscale_ found finite gradients alone; the host waits for the device.
  bool finite() const { return finite_; }
  /// Ends the iteration: backs off after an overflow, grows after growth_interval good steps.
  void update();

 private:
  Options options_;
  double scale_;
  int64_t good_steps_ = 0;
  bool unscaled_ = false;
  bool finite_ = true;
};

}  // namespace megashard
