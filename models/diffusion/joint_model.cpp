#include "models/diffusion/joint_model.h"

#include <ATen/TensorOperators.h>
#include <torch/nn/modules/container/modulelist.h>

namespace megashard {

std::shared_ptr<Hooked<LatentMlp>> register_time_mlp(torch::nn::Module& module, const char* name, int64_t width) {
  const LatentMlpSpec spec{.class_name = "TimestepEmbedding",
                           .in = kJointWaves,
                           .inner = width,
                           .out = width,
                           .activation = Activation::kSilu};
  return module.register_module(name, std::make_shared<Hooked<LatentMlp>>(spec));
}

TimestepTextEmbedding::TimestepTextEmbedding(int64_t width, int64_t pooled_dim, bool has_guidance) {
  timestep_ = register_time_mlp(*this, "timestep_embedder", width);
  if (has_guidance) guidance_ = register_time_mlp(*this, "guidance_embedder", width);
  const LatentMlpSpec text{.class_name = "PixArtAlphaTextProjection",
                           .in = pooled_dim,
                           .inner = width,
                           .out = width,
                           .activation = Activation::kSilu};
  text_ = register_module("text_embedder", std::make_shared<Hooked<LatentMlp>>(text));
}

at::Tensor TimestepTextEmbedding::forward(const at::Tensor& timesteps, const at::Tensor& guidance,
                                          const at::Tensor& pooled) {
  auto sum = timestep_->forward(timestep_waves(timesteps, kJointWaves));
  if (guidance_) sum = sum + guidance_->forward(timestep_waves(guidance, kJointWaves));
  return sum + text_->forward(pooled);
}

JointBlocks register_joint_blocks(torch::nn::Module& model, const JointBlockNames& names, const JointSizes& sizes,
                                  int64_t count) {
  JointBlocks blocks;
  const auto list = model.register_module("transformer_blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < count; ++i) {
    blocks.push_back(std::make_shared<Hooked<JointBlock>>(names, sizes));
    list->push_back(blocks.back());
  }
  return blocks;
}

JointOutput register_joint_output(torch::nn::Module& model, int64_t width, int64_t values) {
  const auto zero = [width](int64_t out) {
    return Linear::Options{.in = width, .out = out, .bias = true, .init_scale = 0};
  };
  return {.norm = register_linear_at(model, "norm_out.linear", zero(2 * width)),
          .proj = register_linear_at(model, "proj_out", zero(values))};
}

at::Tensor JointOutput::forward(const at::Tensor& image, const JointPass& pass) const {
  const auto changes = modulations(norm->forward(pass.time), 2);  // scale, shift
  return proj->forward(modulated_norm(image, {changes[0] + 1, changes[1]}, {}, kJointEps));
}

}  // namespace megashard
