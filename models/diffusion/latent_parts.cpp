#include "models/diffusion/latent_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>
#include <vector>

#include "models/layers/mlp.h"

namespace megashard {
namespace {

constexpr double kTimeTheta = 10000;

Linear::Options with_bias(int64_t in, int64_t out, double init_scale) {
  return {.in = in, .out = out, .bias = true, .init_scale = init_scale};
}

}  // namespace

double xavier_scale(int64_t in, int64_t out) { return std::sqrt(2.0 / static_cast<double>(in + out)) / kLatentInitStd; }

at::Tensor timestep_waves(const at::Tensor& timesteps, int64_t channels, double scale) {
  const int64_t half = channels / 2;
  const auto steps = at::arange(half, timesteps.options().dtype(at::kFloat));
  const auto frequencies = (steps * -std::log(kTimeTheta) / half).exp();
  const auto angles = timesteps.to(at::kFloat).unsqueeze(-1) * frequencies * scale;
  return at::cat({angles.cos(), angles.sin()}, -1);
}

at::Tensor patch_turns(const at::Tensor& positions, at::IntArrayRef widths, double theta) {
  std::vector<at::Tensor> angles;
  for (size_t axis = 0; axis < widths.size(); ++axis) {
    const auto even = at::arange(0, widths[axis], 2, positions.options().dtype(at::kDouble));
    angles.push_back(positions[static_cast<int64_t>(axis)].unsqueeze(-1) /
                     at::pow(theta, even / static_cast<double>(widths[axis])));
  }
  const auto all = at::cat(angles, -1);
  return at::polar(at::ones_like(all), all).to(at::kComplexFloat);
}

at::Tensor turn_neighbours(const at::Tensor& x, const at::Tensor& turns) {
  const auto pairs = at::view_as_complex(x.to(at::kFloat).unflatten(-1, {-1, 2}));
  return at::view_as_real(pairs * turns.unsqueeze(2)).flatten(-2).to(x.scalar_type());
}

Fp32LayerNorm::Fp32LayerNorm(int64_t width, double eps) : eps_(eps) {
  weight_ = register_parameter("weight", at::ones({width}));
  bias_ = register_parameter("bias", at::zeros({width}));
}

at::Tensor Fp32LayerNorm::forward(const at::Tensor& x) {
  return modulated_norm(x, {weight_.to(at::kFloat), bias_.to(at::kFloat)}, at::Tensor(), eps_);
}

void Fp32LayerNorm::init_own_weights(const WeightInit& /*init*/) {
  weight_.fill_(1);
  bias_.zero_();
}

LatentMlp::LatentMlp(const LatentMlpSpec& spec) : class_name_(spec.class_name), activation_(spec.activation) {
  const auto layer = [&](const char* name, int64_t in, int64_t out) {
    const double scale = spec.init_scale > 0 ? spec.init_scale : xavier_scale(in, out);
    return register_module(name, std::make_shared<Hooked<Linear>>(with_bias(in, out, scale)));
  };
  first_ = layer("linear_1", spec.in, spec.inner);
  second_ = layer("linear_2", spec.inner, spec.out);
}

at::Tensor LatentMlp::forward(const at::Tensor& x) {
  return second_->forward(activate(first_->forward(x.to(first_->weight.scalar_type())), activation_));
}

FeedForward::FeedForward(int64_t in, int64_t inner, int64_t out, Activation activation) : activation_(activation) {
  const auto net = register_module("net", std::make_shared<torch::nn::ModuleListImpl>());
  const auto entry = std::make_shared<torch::nn::ModuleListImpl>();
  proj_ =
      entry->register_module("proj", std::make_shared<Hooked<Linear>>(with_bias(in, inner, xavier_scale(in, inner))));
  out_ = std::make_shared<Hooked<Linear>>(with_bias(inner, out, xavier_scale(inner, out)));
  net->push_back(entry);
  net->register_module("2", out_);  // 1 is a dropout
}

at::Tensor FeedForward::forward(const at::Tensor& x) { return out_->forward(activate(proj_->forward(x), activation_)); }

Linear::Options xavier_linear(int64_t in, int64_t out) { return with_bias(in, out, xavier_scale(in, out)); }

std::shared_ptr<Hooked<Linear>> register_linear_at(torch::nn::Module& module, const std::string& path,
                                                   const Linear::Options& options) {
  const auto dot = path.find('.');
  if (dot == std::string::npos) return module.register_module(path, std::make_shared<Hooked<Linear>>(options));
  const auto container = module.register_module(path.substr(0, dot), std::make_shared<torch::nn::ModuleListImpl>());
  return register_linear_at(*container, path.substr(dot + 1), options);
}

}  // namespace megashard
