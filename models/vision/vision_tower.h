#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/layers/pass.h"
#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "models/vision/vision_plan.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

class PatchEmbed : public torch::nn::Module {
 public:
  explicit PatchEmbed(const VisionConfig& config);

  at::Tensor forward(const at::Tensor& patches) { return proj_->forward(patches); }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<PatchConvolution>> proj_;
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
  std::shared_ptr<Hooked<Mlp>> gated_mlp_;  // Qwen2.5, GLM-4.5V
  std::shared_ptr<Hooked<PlainMlp>> mlp_;   // Qwen3
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
