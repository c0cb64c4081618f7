#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/audio/audio_plan.h"
#include "models/config/audio_config.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/vision/tower_parts.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// A convolution of 3 x 3 with steps of 2 over [N, in, bins, frames], which halves both; then GELU.
class HalvingConvolution : public torch::nn::Module, public SelfInitializing {
 public:
  HalvingConvolution(int64_t in, int64_t out);

  at::Tensor forward(const at::Tensor& x);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Conv2d"; }

 private:
  at::Tensor weight_, bias_;
};

/// Rows of sines and cosines, one for each place in a chunk. It has no parameters.
class SinusoidPositions : public torch::nn::Module {
 public:
  explicit SinusoidPositions(int64_t channels) : channels_(channels) {}

  at::Tensor forward(const at::Tensor& hidden);  // [N, T, channels], plus the rows
  std::string class_name() const { return "SinusoidsPositionEmbedding"; }

 private:
  int64_t channels_;
  at::Tensor table_;  // [T, channels] fp32, of the longest chunk so far
};

/// x + self_attn(self_attn_layer_norm(x)), then x + fc2(act(fc1(final_layer_norm(x)))).
class AudioLayer : public torch::nn::Module {
 public:
  explicit AudioLayer(const AudioConfig& config);

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context);  // [features, hidden]
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  std::shared_ptr<Hooked<TowerAttention>> attention_;
  std::shared_ptr<Hooked<Norm>> attention_norm_, final_norm_;
  std::shared_ptr<Hooked<Linear>> fc1_, fc2_;
};

/// act(first(x)) through a second layer: `proj1` and `proj2` of a tower, or a module of its own.
struct AudioProjection {
  std::shared_ptr<Hooked<Linear>> first, second;
  at::Tensor of(const at::Tensor& hidden, Activation activation) const;
};

/// `audio_tower` (transformers' Qwen3OmniMoeAudioEncoder, Qwen3ASREncoder).
class AudioTower : public torch::nn::Module {
 public:
  explicit AudioTower(const AudioConfig& config);

  /// frames [plan.frames, bins] -> [features, out], or [features, hidden] with AudioConfig::has_projector.
  at::Tensor forward(const at::Tensor& frames, const AudioPlan& plan);
  std::string class_name() const { return config_.names.tower; }

 private:
  at::Tensor convolve(const at::Tensor& frames, const AudioPlan& plan);  // -> [features, hidden]

  AudioConfig config_;
  std::vector<std::shared_ptr<Hooked<HalvingConvolution>>> convolutions_;
  std::shared_ptr<Hooked<Linear>> conv_out_;
  std::shared_ptr<Hooked<SinusoidPositions>> positions_;
  std::vector<std::shared_ptr<Hooked<AudioLayer>>> layers_;
  std::shared_ptr<Hooked<Norm>> norm_;
  AudioProjection projection_;
};

/// `multi_modal_projector`: linear_1 and linear_2.
class AudioProjector : public torch::nn::Module {
 public:
  explicit AudioProjector(const AudioConfig& config);

  at::Tensor forward(const at::Tensor& hidden) { return projection_.of(hidden, activation_); }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  AudioProjection projection_;
};

}  // namespace megashard
