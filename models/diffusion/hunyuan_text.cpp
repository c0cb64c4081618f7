#include "models/diffusion/hunyuan_text.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>

#include "models/layers/full_attention.h"
#include "models/layers/mlp.h"

namespace megashard {
namespace {

constexpr double kProjectionEps = 1e-5;

std::shared_ptr<Hooked<Norm>> register_layer_norm(torch::nn::Module& module, const char* name, int64_t width,
                                                  double eps) {
  const NormSpec spec{.class_name = "LayerNorm", .width = width, .kind = NormKind::kLayerNorm, .eps = eps};
  return module.register_module(name, std::make_shared<Hooked<Norm>>(spec));
}

std::shared_ptr<Hooked<Linear>> register_xavier(torch::nn::Module& module, const std::string& name, int64_t in,
                                                int64_t out) {
  return module.register_module(name, std::make_shared<Hooked<Linear>>(xavier_linear(in, out)));
}

}  // namespace

RefinerAttention::RefinerAttention(const JointSizes& sizes) : num_heads_(sizes.num_heads) {
  const int64_t width = sizes.width();
  to_q_ = register_xavier(*this, "to_q", width, width);
  to_k_ = register_xavier(*this, "to_k", width, width);
  to_v_ = register_xavier(*this, "to_v", width, width);
  to_out_ = register_linear_at(*this, "to_out.0", xavier_linear(width, width));
}

at::Tensor RefinerAttention::forward(const at::Tensor& normed, const RefinerPass& pass) {
  const auto heads = [&](Linear& layer) { return layer.forward(normed).unflatten(-1, {num_heads_, -1}); };
  return to_out_->forward(
      full_self_attention(heads(*to_q_), heads(*to_k_), heads(*to_v_), pass.key_mask, /*sequence=*/{}).flatten(2));
}

RefinerBlock::RefinerBlock(const JointSizes& sizes) {
  const int64_t width = sizes.width();
  norm1_ = register_layer_norm(*this, "norm1", width, kJointEps);
  attn_ = register_module("attn", std::make_shared<Hooked<RefinerAttention>>(sizes));
  norm2_ = register_layer_norm(*this, "norm2", width, kJointEps);
  ff_ = register_module("ff", std::make_shared<Hooked<FeedForward>>(width, 4 * width, width, Activation::kSilu));
  gates_ = register_linear_at(*this, "norm_out.linear", {.in = width, .out = 2 * width, .bias = true, .init_scale = 0});
}

at::Tensor RefinerBlock::forward(const at::Tensor& hidden, const RefinerPass& pass) {
  const auto gates = modulations(gates_->forward(pass.time), 2);
  const auto x = gated_sum(hidden, attn_->forward(norm1_->forward(hidden), pass), gates[0], {});
  return gated_sum(x, ff_->forward(norm2_->forward(x)), gates[1], {});
}

TokenRefiner::TokenRefiner(int64_t text_dim, const JointSizes& sizes, int64_t num_layers) {
  const int64_t width = sizes.width();
  time_text_embed_ = register_module(
      "time_text_embed", std::make_shared<Hooked<TimestepTextEmbedding>>(width, text_dim, /*has_guidance=*/false));
  proj_in_ = register_xavier(*this, "proj_in", text_dim, width);
  const auto refiner = register_module("token_refiner", std::make_shared<torch::nn::ModuleListImpl>());
  const auto list = refiner->register_module("refiner_blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < num_layers; ++i) {
    blocks_.push_back(std::make_shared<Hooked<RefinerBlock>>(sizes));
    list->push_back(blocks_.back());
  }
}

at::Tensor TokenRefiner::forward(const at::Tensor& features, const at::Tensor& mask, const at::Tensor& timesteps) {
  const auto counted = mask.unsqueeze(-1).to(at::kFloat);
  const auto mean = (features * counted).sum(1) / counted.sum(1);
  const auto time = time_text_embed_->forward(timesteps, {}, mean.to(features.scalar_type()));
  const RefinerPass pass{.time = at::silu(time), .key_mask = mask};
  auto hidden = proj_in_->forward(features);
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  return hidden;
}

GlyphProjection::GlyphProjection(int64_t in, int64_t out) {
  norm_ = register_layer_norm(*this, "norm", in, kProjectionEps);
  linears_ = {register_xavier(*this, "linear_1", in, kGlyphWidth),
              register_xavier(*this, "linear_2", kGlyphWidth, kGlyphWidth),
              register_xavier(*this, "linear_3", kGlyphWidth, out)};
}

at::Tensor GlyphProjection::forward(const at::Tensor& features) {
  auto x = linears_[0]->forward(norm_->forward(features));
  for (size_t i = 1; i < linears_.size(); ++i) x = linears_[i]->forward(activate(x, Activation::kGelu));
  return x;
}

ImageProjection::ImageProjection(int64_t in, int64_t out) {
  norm_in_ = register_layer_norm(*this, "norm_in", in, kProjectionEps);
  linear_1_ = register_xavier(*this, "linear_1", in, in);
  linear_2_ = register_xavier(*this, "linear_2", in, out);
  norm_out_ = register_layer_norm(*this, "norm_out", out, kProjectionEps);
}

at::Tensor ImageProjection::forward(const at::Tensor& features) {
  const auto x = activate(linear_1_->forward(norm_in_->forward(features)), Activation::kGelu);
  return norm_out_->forward(linear_2_->forward(x));
}

}  // namespace megashard
