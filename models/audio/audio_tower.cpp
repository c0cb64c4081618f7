#include "models/audio/audio_tower.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "models/kernels/fused_ops.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

std::shared_ptr<Hooked<Norm>> layer_norm(const AudioConfig& config) {
  return std::make_shared<Hooked<Norm>>(
      NormSpec{.class_name = "LayerNorm", .width = config.hidden_size, .kind = NormKind::kLayerNorm, .eps = 1e-5});
}

std::shared_ptr<Hooked<Linear>> linear_layer(int64_t in, int64_t out, bool bias = true) {
  return std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out, .bias = bias});
}

TowerLayerSpec attention_spec(const AudioConfig& config) {
  return {.attention_class = config.names.attention,
          .norm = {.width = config.hidden_size},
          .num_heads = config.num_heads,
          .qkv_bias = true,
          .out_bias = true};
}

AudioProjection add_projection(torch::nn::Module& owner, const AudioConfig& config, const char* first,
                               const char* second) {
  return {owner.register_module(first, linear_layer(config.hidden_size, config.hidden_size)),
          owner.register_module(second, linear_layer(config.hidden_size, config.out_size))};
}

}  // namespace

HalvingConvolution::HalvingConvolution(int64_t in, int64_t out) {
  weight_ = register_parameter("weight", at::empty({out, in, 3, 3}));
  bias_ = register_parameter("bias", at::empty({out}));
}

at::Tensor HalvingConvolution::forward(const at::Tensor& x) {
  return at::gelu(at::conv2d(x.to(weight_.scalar_type()), weight_, bias_, /*stride=*/2, /*padding=*/1));
}

void HalvingConvolution::init_own_weights(const WeightInit& init) {
  weight_.normal_(0, init.std, init.generator);
  bias_.zero_();
}

at::Tensor SinusoidPositions::forward(const at::Tensor& hidden) {
  const int64_t length = hidden.size(1);
  if (!table_.defined() || table_.device() != hidden.device() || table_.size(0) < length) {
    const c10::InferenceMode no_inference(false);  // training may use them later
    const at::NoGradGuard no_grad;
    const auto numbers = at::arange(channels_ / 2, at::TensorOptions().dtype(at::kFloat));
    const double step = std::log(10000.0) / static_cast<double>(channels_ / 2 - 1);
    const auto angles = at::arange(length, at::kLong).unsqueeze(1) * (numbers * -step).exp();
    table_ = on_device(at::cat({angles.sin(), angles.cos()}, 1), hidden.device());
  }
  return hidden + table_.narrow(0, 0, length).to(hidden.scalar_type());
}

AudioLayer::AudioLayer(const AudioConfig& config) : class_name_(config.names.layer), activation_(config.activation) {
  attention_ = register_module("self_attn", std::make_shared<Hooked<TowerAttention>>(attention_spec(config)));
  attention_norm_ = register_module("self_attn_layer_norm", layer_norm(config));
  fc1_ = register_module("fc1", linear_layer(config.hidden_size, config.intermediate_size));
  fc2_ = register_module("fc2", linear_layer(config.intermediate_size, config.hidden_size));
  final_norm_ = register_module("final_layer_norm", layer_norm(config));
}

at::Tensor AudioLayer::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto attended = hidden + attention_->forward(attention_norm_->forward(hidden), context);
  return attended + fc2_->forward(activate(fc1_->forward(final_norm_->forward(attended)), activation_));
}

at::Tensor AudioProjection::of(const at::Tensor& hidden, Activation activation) const {
  return second->forward(activate(first->forward(hidden), activation));
}

AudioTower::AudioTower(const AudioConfig& config) : config_(config) {
  positions_ =
      register_module("positional_embedding", std::make_shared<Hooked<SinusoidPositions>>(config.hidden_size));
  const auto layers = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.depth; ++i) {
    layers_.push_back(std::make_shared<Hooked<AudioLayer>>(config));
    layers->push_back(layers_.back());
  }
  norm_ = register_module("ln_post", layer_norm(config));
  for (const char* name : {"conv2d1", "conv2d2", "conv2d3"}) {
    const int64_t in = convolutions_.empty() ? 1 : config.conv_channels;
    convolutions_.push_back(
        register_module(name, std::make_shared<Hooked<HalvingConvolution>>(in, config.conv_channels)));
  }
  conv_out_ =
      register_module("conv_out", linear_layer(config.conv_channels * AudioConfig::features_of(config.mel_bins),
                                               config.hidden_size, /*bias=*/false));
  if (!config.has_projector) projection_ = add_projection(*this, config, "proj1", "proj2");
}

at::Tensor AudioTower::convolve(const at::Tensor& frames, const AudioPlan& plan) {
  const auto padded = at::constant_pad_nd(frames, {0, 0, 0, 1});  // a row of zeros behind the frames
  std::vector<at::Tensor> rows;
  for (const auto& chunks : plan.chunks) {
    const auto all = on_device(chunks.frames, frames.device());
    for (const auto& some : all.split(config_.convolved)) {
      auto x = padded.index_select(0, some.flatten()).unflatten(0, some.sizes()).transpose(1, 2).unsqueeze(1);
      for (const auto& convolution : convolutions_) x = convolution->forward(x);
      const auto features = conv_out_->forward(x.permute({0, 3, 1, 2}).flatten(2));  // [chunks, T, hidden]
      rows.push_back(positions_->forward(features).flatten(0, 1));
    }
  }
  return (rows.size() == 1 ? rows[0] : at::cat(rows)).index_select(0, on_device(plan.rows, frames.device()));
}

at::Tensor AudioTower::forward(const at::Tensor& frames, const AudioPlan& plan) {
  auto hidden = convolve(frames, plan);
  const VisionContext context{{}, on_device(plan.windows, frames.device())};
  for (const auto& layer : layers_) hidden = layer->forward(hidden, context);
  hidden = norm_->forward(hidden);
  return config_.has_projector ? hidden : projection_.of(hidden, config_.activation);
}

AudioProjector::AudioProjector(const AudioConfig& config)
    : class_name_(config.names.projector),
      activation_(config.activation),
      projection_(add_projection(*this, config, "linear_1", "linear_2")) {}

}  // namespace megashard
