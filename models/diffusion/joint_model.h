#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "models/diffusion/joint_parts.h"

namespace megashard {

// What models of text and patches share besides their blocks.

/// Channels of a timestep's waves.
inline constexpr int64_t kJointWaves = 256;

/// timestep_embedder, guidance_embedder if the model is distilled from guidance, text_embedder of pooled features.
class TimestepTextEmbedding : public torch::nn::Module {
 public:
  TimestepTextEmbedding(int64_t width, int64_t pooled_dim, bool has_guidance);

  /// timesteps and guidance [B] in 0 .. 1000, pooled [B, P] -> [B, C].
  at::Tensor forward(const at::Tensor& timesteps, const at::Tensor& guidance, const at::Tensor& pooled);
  std::string class_name() const {
    return guidance_ ? "CombinedTimestepGuidanceTextProjEmbeddings" : "CombinedTimestepTextProjEmbeddings";
  }

 private:
  std::shared_ptr<Hooked<LatentMlp>> timestep_, guidance_, text_;
};

/// Registers timestep_embedder or the like: from waves to the model's width.
std::shared_ptr<Hooked<LatentMlp>> register_time_mlp(torch::nn::Module& module, const char* name, int64_t width);

using JointBlocks = std::vector<std::shared_ptr<Hooked<JointBlock>>>;
/// Registers transformer_blocks.
JointBlocks register_joint_blocks(torch::nn::Module& model, const JointBlockNames& names, const JointSizes& sizes,
                                  int64_t count);

/// norm_out and proj_out.
struct JointOutput {
  std::shared_ptr<Hooked<Linear>> norm, proj;

  at::Tensor forward(const at::Tensor& image, const JointPass& pass) const;
};
/// `values`: of a patch. Both layers begin with zeros, as in SD3's and DiT's training.
JointOutput register_joint_output(torch::nn::Module& model, int64_t width, int64_t values);

}  // namespace megashard
