#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "models/diffusion/joint_model.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

// Projections of HunyuanVideo 1.5's text, glyph and image features to the blocks' width.

/// Inputs that all refiner blocks share.
struct RefinerPass {
  at::Tensor time;      // silu of what gates [B, C]
  at::Tensor key_mask;  // [B, L] bool

  template <class F>
  void visit_tensors(F&& f) {
    f(time);
    f(key_mask);
  }
};

/// to_q, to_k, to_v, to_out.0 of text that attends to itself.
class RefinerAttention : public torch::nn::Module {
 public:
  explicit RefinerAttention(const JointSizes& sizes);

  at::Tensor forward(const at::Tensor& normed, const RefinerPass& pass);
  std::string class_name() const { return "Attention"; }

 private:
  int64_t num_heads_;
  std::shared_ptr<Hooked<Linear>> to_q_, to_k_, to_v_, to_out_;
};

/// norm1, attn, norm2, ff; norm_out.linear makes their gates.
class RefinerBlock : public torch::nn::Module {
 public:
  explicit RefinerBlock(const JointSizes& sizes);

  at::Tensor forward(const at::Tensor& hidden, const RefinerPass& pass);  // [B, L, C]
  std::string class_name() const { return "HunyuanVideo15IndividualTokenRefinerBlock"; }

 private:
  std::shared_ptr<Hooked<Norm>> norm1_, norm2_;
  std::shared_ptr<Hooked<RefinerAttention>> attn_;
  std::shared_ptr<Hooked<FeedForward>> ff_;
  std::shared_ptr<Hooked<Linear>> gates_;
};

/// Features of a language model: time_text_embed, proj_in, token_refiner.refiner_blocks.
class TokenRefiner : public torch::nn::Module {
 public:
  TokenRefiner(int64_t text_dim, const JointSizes& sizes, int64_t num_layers);

  /// features [B, L, D], mask [B, L] bool, timesteps [B] -> [B, L, C].
  at::Tensor forward(const at::Tensor& features, const at::Tensor& mask, const at::Tensor& timesteps);
  std::string class_name() const { return "HunyuanVideo15TokenRefiner"; }

 private:
  std::shared_ptr<Hooked<TimestepTextEmbedding>> time_text_embed_;
  std::shared_ptr<Hooked<Linear>> proj_in_;
  std::vector<std::shared_ptr<Hooked<RefinerBlock>>> blocks_;
};

/// Features of letters (ByT5): norm, linear_1, linear_2, linear_3.
class GlyphProjection : public torch::nn::Module {
 public:
  GlyphProjection(int64_t in, int64_t out);

  at::Tensor forward(const at::Tensor& features);
  std::string class_name() const { return "HunyuanVideo15ByT5TextProjection"; }

 private:
  std::shared_ptr<Hooked<Norm>> norm_;
  std::vector<std::shared_ptr<Hooked<Linear>>> linears_;
};

/// Features of a picture (SigLIP): norm_in, linear_1, linear_2, norm_out.
class ImageProjection : public torch::nn::Module {
 public:
  ImageProjection(int64_t in, int64_t out);

  at::Tensor forward(const at::Tensor& features);
  std::string class_name() const { return "HunyuanVideo15ImageProjection"; }

 private:
  std::shared_ptr<Hooked<Norm>> norm_in_, norm_out_;
  std::shared_ptr<Hooked<Linear>> linear_1_, linear_2_;
};

/// Width inside GlyphProjection.
inline constexpr int64_t kGlyphWidth = 2048;

}  // namespace megashard
