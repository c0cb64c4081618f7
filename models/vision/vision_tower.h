#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/layers/pass.h"
#include "models/vision/vision_plan.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// A convolution over patches that do not overlap, computed as a product with the flattened weight, whose sizes are
/// those in the files.
class PatchConvolution : public torch::nn::Module, public SelfInitializing {
 public:
  explicit PatchConvolution(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& patches);  // [P, C * T * S * S] -> [P, hidden]
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Conv3d"; }

  at::Tensor weight;  // [hidden, C, T, S, S]
  at::Tensor bias;    // [hidden], Qwen3
};

class PatchEmbed : public torch::nn::Module {
 public:
  explicit PatchEmbed(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& patches) { return proj_->forward(patches); }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<PatchConvolution>> proj_;
};

/// Inputs that all blocks of a forward share.
struct VisionContext {
  RotaryTables rotary;  // [P, head / 2] fp32
  Segments segments;

  template <class F>
  void visit_tensors(F&& f) {
    rotary.visit_tensors(f);
    segments.visit_tensors(f);
  }
};

/// Attention within segments: qkv and proj. The rotation is computed in fp32.
class VisionAttention : public torch::nn::Module {
 public:
  explicit VisionAttention(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context);  // [P, E] -> [P, E]
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  int64_t num_heads_;
  std::shared_ptr<Hooked<Linear>> qkv_, proj_;
};

/// fc2(act(fc1(x))): linear_fc1, linear_fc2.
class VisionMlp : public torch::nn::Module {
 public:
  explicit VisionMlp(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& hidden);
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  std::shared_ptr<Hooked<Linear>> linear_fc1_, linear_fc2_;
};

/// x + attn(norm1(x)), then x + mlp(norm2(x)).
class VisionBlock : public torch::nn::Module {
 public:
  explicit VisionBlock(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context);
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<Norm>> norm1_, norm2_;
  std::shared_ptr<Hooked<VisionAttention>> attn_;
  std::shared_ptr<Hooked<Mlp>> gated_mlp_;  // Qwen2.5
  std::shared_ptr<Hooked<VisionMlp>> mlp_;  // Qwen3
};

/// Merges merge^2 neighbouring patches into one feature: norm of each patch (for deepstack: of all merged patches),
/// then two linear layers.
class PatchMerger : public torch::nn::Module {
 public:
  PatchMerger(const VisionConfig& config, bool norm_of_all);

  at::Tensor forward(const at::Tensor& hidden);  // [P, E] -> [P / merge^2, out]
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  int64_t width_;
  bool norm_of_all_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<Linear>> first_, second_;
};

struct VisionFeatures {
  at::Tensor features;                // [features, out]
  std::vector<at::Tensor> deepstack;  // each [features, out]

  template <class F>
  void visit_tensors(F&& f) {
    f(features);
    f(deepstack);
  }
};

/// `model.visual`: maps the patches of all images and frames of a batch to features, in order.
class VisionTower : public torch::nn::Module {
 public:
  explicit VisionTower(const VisionConfig& config);

  /// patches [P, C * T * S * S], P as in the plan.
  VisionFeatures forward(const at::Tensor& patches, const VisionPlan& plan);
  std::string class_name() const { return config_.names.tower; }

 private:
  at::Tensor learned_positions(const VisionPlan& plan, const at::Tensor& hidden);

  VisionConfig config_;
  std::shared_ptr<Hooked<PatchEmbed>> patch_embed_;
  std::shared_ptr<Hooked<Embedding>> pos_embed_;
  std::vector<std::shared_ptr<Hooked<VisionBlock>>> blocks_;
  std::shared_ptr<Hooked<PatchMerger>> merger_;
  std::vector<std::shared_ptr<Hooked<PatchMerger>>> deepstack_mergers_;
  at::Tensor frequencies_;  // of the rotation, on the device of the last forward
};

}  // namespace megashard
