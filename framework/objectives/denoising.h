#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string>
#include <vector>

#include "framework/objectives/objectives.h"

namespace megashard {

/// num_train_timesteps of the field's schedulers.
inline constexpr int64_t kTimestepCount = 1000;

/// Mixes latents x and noise n: a model gets latents * x + noise * n at `timestep`, and its target is
/// target_latents * x + target_noise * n.
struct NoiseLevel {
  double timestep;  ///< 0 .. 1000
  double latents, noise;
  double target_latents, target_noise;
  double weight = 1;  ///< multiplies the sample's loss
};

/// A loss of models of latents: the weighted mean of the patches' squared errors. The data loader adds the noise
/// (prepare): of each sample by its seed alone, so that it is the same on any number of ranks and after a resume. A
/// data set may give the columns `noise` and `timesteps` instead.
class Denoising : public Objective {
 public:
  std::vector<std::string> columns() const override;
  Needs needs() const override { return {.latents = true}; }
  void prepare(Batch& batch) const override;
  at::Tensor count(const Batch& whole) const override { return whole.at(kLossMask).sum(); }
  at::Tensor weights(const Batch& batch) const override;
  Loss operator()(const LossInputs& in) const override;

 protected:
  /// `name`: of the metric.
  explicit Denoising(std::string name) : name_(std::move(name)) {}

  /// Draws the timestep of a sample of so many patches.
  virtual double draw_timestep(at::Generator& generator, int64_t patches) const = 0;
  virtual NoiseLevel level_at(double timestep) const = 0;

 private:
  std::string name_;
};

/// Moves a noise level sigma from [0, 1] towards noise; 1 / shift moves it back (flow_shift).
inline double shifted_sigma(double sigma, double shift) { return shift * sigma / (1 + (shift - 1) * sigma); }

/// A number from [0, 1) in double precision.
double uniform_draw(at::Generator& generator);

}  // namespace megashard
