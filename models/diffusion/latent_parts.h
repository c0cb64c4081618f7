#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/decoder_config.h"
#include "models/diffusion/modulation.h"
#include "models/layers/linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Standard deviation of weights where a model draws N(0, std) (WeightInit::std).
inline constexpr double kLatentInitStd = 0.02;
/// Linear::Options::init_scale for the variance of Xavier's initialisation.
double xavier_scale(int64_t in, int64_t out);

/// [cos(a_i) | sin(a_i)] with a_i = scale (t 10000^(-2 i / channels)), in fp32: timesteps [...] -> [..., channels].
at::Tensor timestep_waves(const at::Tensor& timesteps, int64_t channels, double scale = 1);

/// e^(i angle) for each pair of a head's channels, complex64 [B, T, D / 2]: for each axis of `positions` [axes, B, T]
/// the next widths[axis] channels turn by position * theta^(-2 i / width), computed in fp64.
at::Tensor patch_turns(const at::Tensor& positions, at::IntArrayRef widths, double theta);
/// Rotates pairs of neighbours of x [B, T, H, D] in fp32; the result has x's dtype.
at::Tensor turn_neighbours(const at::Tensor& x, const at::Tensor& turns);

/// LayerNorm with parameters in fp32 (diffusers' FP32LayerNorm).
class Fp32LayerNorm : public torch::nn::Module, public SelfInitializing {
 public:
  Fp32LayerNorm(int64_t width, double eps);

  at::Tensor forward(const at::Tensor& x);  // [B, T, C]
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "FP32LayerNorm"; }

 private:
  double eps_;
  at::Tensor weight_, bias_;  // [C]
};

/// Two linear layers with biases and an activation between them, `names` as in diffusers: "linear_1", "linear_2".
struct LatentMlpSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t in = 0, inner = 0, out = 0;
  Activation activation = Activation::kGeluTanh;
  double init_scale = 1;  ///< both weights'; 0: Xavier's
};

class LatentMlp : public torch::nn::Module {
 public:
  explicit LatentMlp(const LatentMlpSpec& spec);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out], x in any dtype
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  std::shared_ptr<Hooked<Linear>> first_, second_;
};

/// diffusers' FeedForward: net.0.proj, activation, net.2.
class FeedForward : public torch::nn::Module {
 public:
  FeedForward(int64_t in, int64_t inner, int64_t out, Activation activation);

  at::Tensor forward(const at::Tensor& x);
  std::string class_name() const { return "FeedForward"; }

 private:
  Activation activation_;
  std::shared_ptr<Hooked<Linear>> proj_, out_;
};

/// Registers a linear layer below containers: "to_out.0", "norm1.linear". Their first name must be new.
std::shared_ptr<Hooked<Linear>> register_linear_at(torch::nn::Module& module, const std::string& path,
                                                   const Linear::Options& options);
/// A layer with a bias and Xavier's variance.
Linear::Options xavier_linear(int64_t in, int64_t out);

}  // namespace megashard
