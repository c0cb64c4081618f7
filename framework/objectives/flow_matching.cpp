#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/special_ndtri.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "framework/mistakes.h"
#include "framework/objectives/denoising.h"

namespace megashard {
namespace {

enum class Sampling { kUniform, kLogitNormal };
const std::vector<std::string> kSamplings{"uniform", "logit-normal"};

enum class Weighting { kNone, kBsmntw, kSigmaSqrt, kCosmap, kLinear };
const std::vector<std::string> kWeightings{"none", "bsmntw", "sigma-sqrt", "cosmap", "linear"};

enum class ShiftBy { kValue, kLength, kLtx2Length };
const std::vector<std::string> kShiftings{"value", "length", "ltx2-length"};

/// Logarithms of the shift at two numbers of patches; between and beyond them it is linear.
struct ShiftLine {
  double few, least, many, most;
  double at(int64_t patches) const {
    return std::exp(least + (most - least) * (static_cast<double>(patches) - few) / (many - few));
  }
};
constexpr ShiftLine kFluxShift{.few = 256, .least = 0.5, .many = 4096, .most = 1.15};
constexpr ShiftLine kLtx2Shift{.few = 1024, .least = 0.95, .many = 4096, .most = 2.05};

struct FlowOptions {
  Sampling sampling;
  double logit_mean, logit_std;
  double shift;
  ShiftBy shift_by;
  double least, most;  // timesteps
  Weighting weighting;
};

/// The bell around the timestep 500 of DiffSynth-Studio and MindSpeed-MM.
double bell(double timestep) {
  const double distance = (timestep - 500) / 1000;
  return std::exp(-2 * distance * distance);
}

/// Rectified flow: x_t = (1 - sigma) x + sigma n at the timestep 1000 sigma, and the target is the velocity n - x.
/// Sigma is drawn, then shifted towards noise: s sigma / (1 + (s - 1) sigma).
class FlowMatching final : public Denoising {
 public:
  explicit FlowMatching(const FlowOptions& options) : Denoising("flow matching loss"), options_(options) {
    require(options.least < options.most, "--timestep-min must be smaller than --timestep-max.");
    // Over the noise levels 1, 0.999 ... 0.001 the weights of the bell begin at 0 and have the mean 1.
    std::vector<double> bells;
    for (int64_t i = 1; i <= kTimestepCount; ++i)
      bells.push_back(bell(kTimestepCount * shifted_sigma(static_cast<double>(i) / kTimestepCount, options.shift)));
    bell_floor_ = *std::ranges::min_element(bells);
    bell_mean_ = std::accumulate(bells.begin(), bells.end(), 0.0) / kTimestepCount - bell_floor_;
  }

 protected:
  double draw_timestep(at::Generator& generator, int64_t patches) const override {
    const double shift = shift_for(patches);
    const auto share_before = [&](double timestep) {
      return share_below(shifted_sigma(timestep / kTimestepCount, 1 / shift));
    };
    const double least = share_before(options_.least), most = share_before(options_.most);
    const double sigma = with_share_below(least + uniform_draw(generator) * (most - least));
    return kTimestepCount * shifted_sigma(sigma, shift);
  }

  NoiseLevel level_at(double timestep) const override {
    const double sigma = timestep / kTimestepCount;
    return {.timestep = timestep,
            .latents = 1 - sigma,
            .noise = sigma,
            .target_latents = -1,
            .target_noise = 1,
            .weight = weight_at(timestep)};
  }

 private:
  double shift_for(int64_t patches) const {
    switch (options_.shift_by) {
      case ShiftBy::kValue:
        break;
      case ShiftBy::kLength:
        return kFluxShift.at(patches);
      case ShiftBy::kLtx2Length:
        return kLtx2Shift.at(patches);
    }
    return options_.shift;
  }

  /// The distribution function of sigma before the shift.
  double share_below(double sigma) const {
    if (options_.sampling == Sampling::kUniform || sigma <= 0 || sigma >= 1) return std::clamp(sigma, 0.0, 1.0);
    const double logit = std::log(sigma / (1 - sigma));
    return std::erfc((options_.logit_mean - logit) / options_.logit_std / std::numbers::sqrt2) / 2;
  }

  /// The inverse of share_below().
  double with_share_below(double share) const {
    if (options_.sampling == Sampling::kUniform) return share;
    const double normal = at::special_ndtri(at::scalar_tensor(share, at::kDouble)).item<double>();
    return 1 / (1 + std::exp(-(options_.logit_mean + options_.logit_std * normal)));
  }

  double weight_at(double timestep) const {
    const double sigma = std::max(timestep, 1.0) / kTimestepCount;  // as the smallest one of the field's schedulers
    switch (options_.weighting) {
      case Weighting::kNone:
        break;
      case Weighting::kBsmntw:
        return std::max(0.0, bell(timestep) - bell_floor_) / bell_mean_;
      case Weighting::kSigmaSqrt:
        return 1 / (sigma * sigma);
      case Weighting::kCosmap:
        return 2 / (std::numbers::pi * (1 - 2 * sigma + 2 * sigma * sigma));
      case Weighting::kLinear:
        return 1 + options_.shift * sigma;
    }
    return 1;
  }

  FlowOptions options_;
  double bell_floor_, bell_mean_;
};

const RegisterObjective kRegisteredFlowMatching(
    {.name = "flow-matching",
     .options = {{.flag = "--timestep-sampling",
                  .help = "how sigma = timestep / 1000 is drawn before it is shifted",
                  .words = kSamplings},
                 {.flag = "--timestep-logit-mean",
                  .least = -10,
                  .most = 10,
                  .help = "logit-normal: mean of the logit of sigma (logit_mean)"},
                 {.flag = "--timestep-logit-std",
                  .initial = 1,
                  .least = 1e-3,
                  .most = 100,
                  .help = "logit-normal: its standard deviation (logit_std)"},
                 {.flag = "--timestep-shift",
                  .initial = 1,
                  .least = 1e-3,
                  .most = 1e3,
                  .help = "s: shifts sigma to s sigma / (1 + (s - 1) sigma) (flow_shift)"},
                 {.flag = "--timestep-shift-by",
                  .help = "value: s is --timestep-shift; length: exp(0.5 + 0.65 (patches - 256) / 3840), as Flux's; "
                          "ltx2-length: exp(0.95 + 1.1 (patches - 1024) / 3072)",
                  .words = kShiftings},
                 {.flag = "--timestep-min",
                  .most = 1000,
                  .help = "least timestep, after the shift: 875 for Wan 2.2's model of high noise"},
                 {.flag = "--timestep-max", .initial = 1000, .most = 1000, .help = "largest timestep, after the shift"},
                 {.flag = "--timestep-weighting",
                  .help = "weight of a sample's loss: bsmntw: a bell around 500 with mean 1; sigma-sqrt: sigma^-2; "
                          "cosmap: 2 / (pi (1 - 2 sigma + 2 sigma^2)); linear: 1 + s sigma",
                  .words = kWeightings}},
     .make = [](const std::vector<double>& options) {
       return std::make_unique<FlowMatching>(FlowOptions{static_cast<Sampling>(options[0]), options[1], options[2],
                                                         options[3], static_cast<ShiftBy>(options[4]), options[5],
                                                         options[6], static_cast<Weighting>(options[7])});
     }});

}  // namespace
}  // namespace megashard
