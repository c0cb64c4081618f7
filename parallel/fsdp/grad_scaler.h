#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megashard {

/// Loss scaling for fp16 compute under fully_shard (torch.amp.GradScaler): the loss is multiplied by a scale so that
/// small gradients survive fp16, and a step whose gradients overflow on any rank is skipped on all. Scale and counters
/// live on the device, and only finite(), scale() and state() wait for it.
///   scaler.scale(loss).backward();
///   scaler.unscale_(parameters);           // before clipping
///   if (scaler.finite()) optimizer.step(); // or, without a wait, optimizer.step(scaler.found_inf())
///   scaler.update();
class GradScaler {
 public:
  struct Options {
    double initial_scale = 65536;
    bool is_dynamic = true;  ///< false: the scale stays, and overflows are skipped nevertheless
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;  ///< steps in a row without overflow before the scale grows
    double min_scale = 0;            ///< the scale backs off no further (Megatron)
    int64_t hysteresis = 1;          ///< overflows since it last grew before it backs off (Megatron)
  };
  GradScaler() : GradScaler(Options{}) {}
  /// `device`: where the gradients lie.
  explicit GradScaler(const Options& options, c10::Device device = c10::kCPU);

  bool is_dynamic() const { return options_.is_dynamic; }
  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const;
  const at::Tensor& scale_tensor() const { return scale_; }  ///< 0-d fp32; update() changes it in place

  /// Divides the gradients by the scale and looks for infinities and NaN among all ranks' shards.
  /// Collective: one all-reduce for all parameters that are sharded over the same group. Every rank
  /// passes the same parameters, each once an iteration.
  void unscale_(const std::vector<at::Tensor>& parameters);
  /// Of the last unscale_: 0-d fp32, 1 where there was an overflow on any rank, else 0.
  const at::Tensor& found_inf() const { return found_inf_; }
  bool finite() const;
  /// Ends the iteration: backs off after an overflow, grows after growth_interval good steps.
  void update();
  /// The same without unscale_, by what the caller has found (the same on every rank).
  void update(const at::Tensor& found_inf);

  /// What a checkpoint keeps, with the numbers of torch's and Megatron's scalers.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0;      ///< good steps in a row
    int64_t hysteresis_tracker = 0;  ///< overflows that are left before it backs off
  };
  State state() const;
  void load_state(const State& state);

 private:
  Options options_;
  at::Tensor scale_;                                // 0-d on the device, as all of these
  at::Tensor growth_tracker_, hysteresis_tracker_;  // fp64, which counts exactly
  at::Tensor found_inf_;
  bool unscaled_ = false;
};

}  // namespace megashard
