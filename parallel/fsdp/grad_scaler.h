#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Loss scaling for fp16 compute under fully_shard (torch.amp.GradScaler): scales the loss so that small gradients
/// survive fp16, and skips a step on all ranks if gradients overflow on any. Scale and counters stay on the device;
/// only finite(), scale() and state() block the host on it.
///     scaler.scale(loss).backward();
///     scaler.unscale_(parameters);           // before clipping
///     if (scaler.finite()) optimizer.step(); // or, without blocking, optimizer.step(scaler.found_inf())
///     scaler.update();
class GradScaler {
 public:
  struct Options {
    double initial_scale = 65536;
    bool is_dynamic = true;  ///< false: constant scale; overflows are still skipped
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;  ///< successive steps without overflow before the scale grows
    double min_scale = 0;            ///< lower bound of the scale (Megatron)
    int64_t hysteresis = 1;          ///< overflows since the last growth before it backs off (Megatron)
  };
  GradScaler() : GradScaler(Options{}) {}
  /// `device`: device of the gradients.
  explicit GradScaler(const Options& options, c10::Device device = c10::kCPU);

  bool is_dynamic() const { return options_.is_dynamic; }
  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const;
  const at::Tensor& scale_tensor() const { return scale_; }  ///< 0-d fp32; update() changes it in place

  /// Divides the gradients by the scale and checks all ranks' shards for Inf and NaN. Collective: one all-reduce per
  /// sharding group. Every rank passes the same parameters, each once per iteration.
  void unscale_(const std::vector<at::Tensor>& parameters);
  /// Result of the last unscale_: 0-d fp32, 1 if any rank overflowed, else 0.
  const at::Tensor& found_inf() const { return found_inf_; }
  bool finite() const;
  /// Ends the iteration: backs off after an overflow, grows after growth_interval steps without one.
  void update();
  /// The same without unscale_, with the caller's own found_inf (the same on every rank).
  void update(const at::Tensor& found_inf);

  /// State for checkpoints, with the values of torch's and Megatron's scalers.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0;      ///< successive steps without overflow
    int64_t hysteresis_tracker = 0;  ///< overflows left before the scale backs off
  };
  State state() const;
  void load_state(const State& state);

 private:
  Options options_;
  at::Tensor scale_;                                // 0-d on the device, as are all of these
  at::Tensor growth_tracker_, hysteresis_tracker_;  // fp64, exact for counts
  at::Tensor found_inf_;
  bool unscaled_ = false;
};

}  // namespace megashard
