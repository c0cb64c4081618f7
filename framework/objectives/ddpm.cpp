#include <ATen/TensorOperators.h>
#include <ATen/ops/cumprod.h>
#include <ATen/ops/linspace.h>

#include <algorithm>
#include <cmath>

#include "framework/objectives/denoising.h"

namespace megashard {
namespace {

enum class Prediction { kEpsilon, kVelocity };
enum class Betas { kScaledLinear, kLinear };

struct DdpmOptions {
  Prediction prediction;
  Betas betas;
  double first_beta, last_beta;
  double snr_gamma;
};

/// Denoising diffusion with 1,000 noise levels (diffusers.DDPMScheduler): x_t = sqrt(a) x + sqrt(1 - a) n, with a =
/// alphas_cumprod of the timestep. The target is the noise, or the velocity sqrt(a) n - sqrt(1 - a) x.
class Ddpm final : public Denoising {
 public:
  explicit Ddpm(const DdpmOptions& options)
      : Denoising(options.prediction == Prediction::kEpsilon ? "epsilon loss" : "v-prediction loss"),
        options_(options) {
    const bool is_scaled = options.betas == Betas::kScaledLinear;
    const auto scaled = [&](double beta) { return is_scaled ? std::sqrt(beta) : beta; };
    const at::Tensor line =
        at::linspace(scaled(options.first_beta), scaled(options.last_beta), kTimestepCount, at::kDouble);
    alphas_cumprod_ = at::cumprod(1 - (is_scaled ? line * line : line), 0);
  }

 protected:
  double draw_timestep(at::Generator& generator, int64_t /*patches*/) const override {
    return std::floor(uniform_draw(generator) * kTimestepCount);
  }

  NoiseLevel level_at(double timestep) const override {
    const int64_t index = std::clamp<int64_t>(std::llround(timestep), 0, kTimestepCount - 1);
    const double alpha = alphas_cumprod_.const_data_ptr<double>()[index];
    const double latents = std::sqrt(alpha), noise = std::sqrt(1 - alpha);
    const bool is_epsilon = options_.prediction == Prediction::kEpsilon;
    return {.timestep = static_cast<double>(index),
            .latents = latents,
            .noise = noise,
            .target_latents = is_epsilon ? 0 : -noise,
            .target_noise = is_epsilon ? 1 : latents,
            .weight = weight_for(alpha / (1 - alpha))};
  }

 private:
  /// Min-SNR weights.
  double weight_for(double snr) const {
    if (options_.snr_gamma == 0) return 1;
    return std::min(snr, options_.snr_gamma) / (options_.prediction == Prediction::kEpsilon ? snr : snr + 1);
  }

  DdpmOptions options_;
  at::Tensor alphas_cumprod_;  // [1000] fp64
};

const RegisterObjective kRegisteredDdpm(
    {.name = "ddpm",
     .options = {{.flag = "--ddpm-prediction",
                  .help = "what the model predicts (prediction_type)",
                  .words = {"epsilon", "v-prediction"}},
                 {.flag = "--ddpm-betas",
                  .help = "how the noise grows with the timestep (beta_schedule)",
                  .words = {"scaled-linear", "linear"}},
                 {.flag = "--ddpm-beta-start",
                  .initial = 0.00085,
                  .least = 1e-9,
                  .most = 0.5,
                  .help = "beta of the first timestep (beta_start)"},
                 {.flag = "--ddpm-beta-end",
                  .initial = 0.012,
                  .least = 1e-9,
                  .most = 0.5,
                  .help = "beta of the last timestep (beta_end)"},
                 {.flag = "--ddpm-snr-gamma",
                  .most = 1e3,
                  .help = "a sample's weight is at most this over its signal-to-noise ratio (snr_gamma); 0: always 1"}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<Ddpm>(DdpmOptions{static_cast<Prediction>(options[0]), static_cast<Betas>(options[1]),
                                                 options[2], options[3], options[4]});
     }});

}  // namespace
}  // namespace megashard
