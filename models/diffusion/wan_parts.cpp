#include "models/diffusion/wan_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>

#include <cmath>

#include "models/layers/full_attention.h"

namespace megashard {
namespace {

constexpr double kImageNormEps = 1e-5;

}  // namespace

void init_table(const at::Tensor& table, const WeightInit& init) {
  table.normal_(0, 1 / std::sqrt(static_cast<double>(table.size(2))), init.generator);
}

WanImageEmbedding::WanImageEmbedding(const WanConfig& config) {
  const int64_t in = config.image_dim, out = config.width();
  norm1_ = register_module("norm1", std::make_shared<Hooked<Fp32LayerNorm>>(in, kImageNormEps));
  ff_ = register_module("ff", std::make_shared<Hooked<FeedForward>>(in, in, out, Activation::kGelu));
  norm2_ = register_module("norm2", std::make_shared<Hooked<Fp32LayerNorm>>(out, kImageNormEps));
  if (config.image_positions > 0)
    pos_embed_ = register_parameter("pos_embed", at::empty({1, config.image_positions, in}));
}

at::Tensor WanImageEmbedding::forward(const at::Tensor& features) {
  return norm2_->forward(ff_->forward(norm1_->forward(pos_embed_.defined() ? features + pos_embed_ : features)));
}

void WanImageEmbedding::init_own_weights(const WeightInit& /*init*/) {
  if (pos_embed_.defined()) pos_embed_.zero_();
}

WanTimeTextImageEmbedding::WanTimeTextImageEmbedding(const WanConfig& config) : time_channels_(config.time_channels) {
  const int64_t width = config.width();
  const auto mlp = [&](const char* name, const char* class_name, int64_t in, Activation activation) {
    return register_module(
        name, std::make_shared<Hooked<LatentMlp>>(LatentMlpSpec{
                  .class_name = class_name, .in = in, .inner = width, .out = width, .activation = activation}));
  };
  time_embedder_ = mlp("time_embedder", "TimestepEmbedding", time_channels_, Activation::kSilu);
  time_proj_ = register_module("time_proj", std::make_shared<Hooked<Linear>>(xavier_linear(width, 6 * width)));
  text_embedder_ = mlp("text_embedder", "PixArtAlphaTextProjection", config.text_dim, Activation::kGeluTanh);
  if (config.image_dim > 0)
    image_embedder_ = register_module("image_embedder", std::make_shared<Hooked<WanImageEmbedding>>(config));
}

WanConditions WanTimeTextImageEmbedding::forward(const at::Tensor& timesteps, const at::Tensor& text,
                                                 const at::Tensor& image) {
  const auto dtype = time_proj_->weight.scalar_type();
  const auto time = time_embedder_->forward(timestep_waves(timesteps, time_channels_)).to(dtype);
  WanConditions conditions{.time = time,
                           .modulation = time_proj_->forward(at::silu(time)).unflatten(-1, {6, -1}),
                           .text = text_embedder_->forward(text)};
  if (image_embedder_) conditions.image = image_embedder_->forward(image.to(dtype));
  return conditions;
}

WanAttention::WanAttention(const WanConfig& config, Keys keys) : keys_(keys), num_heads_(config.num_heads) {
  const int64_t width = config.width();
  const auto linear = [&](const char* name) {
    return register_module(name, std::make_shared<Hooked<Linear>>(xavier_linear(width, width)));
  };
  const auto norm = [&](const char* name) {
    const NormSpec spec{.class_name = "RMSNorm", .width = width, .eps = config.eps};
    return register_module(name, std::make_shared<Hooked<Norm>>(spec));
  };
  to_q_ = linear("to_q");
  to_k_ = linear("to_k");
  to_v_ = linear("to_v");
  to_out_ = register_linear_at(*this, "to_out.0", xavier_linear(width, width));
  norm_q_ = norm("norm_q");
  norm_k_ = norm("norm_k");
  if (keys != Keys::kConditions || config.image_dim == 0) return;
  add_k_proj_ = linear("add_k_proj");
  add_v_proj_ = linear("add_v_proj");
  norm_added_k_ = norm("norm_added_k");
}

at::Tensor WanAttention::forward(const at::Tensor& normed, const WanPass& pass) {
  const auto q = heads(norm_q_->forward(to_q_->forward(normed)));
  const auto& seen = keys_ == Keys::kItself ? normed : pass.conditions.text;
  const auto k = heads(norm_k_->forward(to_k_->forward(seen))), v = heads(to_v_->forward(seen));
  if (keys_ == Keys::kItself) {
    const auto mixed = full_self_attention(turn_neighbours(q, pass.turns), turn_neighbours(k, pass.turns), v,
                                           pass.key_mask, pass.sequence);
    return to_out_->forward(mixed.flatten(2));
  }
  auto mixed = full_attention(q, k, v).flatten(2);
  if (add_k_proj_) {
    const auto& image = pass.conditions.image;
    const auto image_k = heads(norm_added_k_->forward(add_k_proj_->forward(image)));
    mixed = mixed + full_attention(q, image_k, heads(add_v_proj_->forward(image))).flatten(2);
  }
  return to_out_->forward(mixed);
}

WanTransformerBlock::WanTransformerBlock(const WanConfig& config) : eps_(config.eps) {
  const int64_t width = config.width();
  attn1_ = register_module("attn1", std::make_shared<Hooked<WanAttention>>(config, WanAttention::Keys::kItself));
  attn2_ = register_module("attn2", std::make_shared<Hooked<WanAttention>>(config, WanAttention::Keys::kConditions));
  if (config.cross_attn_norm)
    norm2_ = register_module("norm2", std::make_shared<Hooked<Fp32LayerNorm>>(width, config.eps));
  ffn_ = register_module("ffn",
                         std::make_shared<Hooked<FeedForward>>(width, config.ffn_dim, width, Activation::kGeluTanh));
  scale_shift_table_ = register_parameter("scale_shift_table", at::empty({1, 6, width}));
}

at::Tensor WanTransformerBlock::forward(const at::Tensor& hidden, const WanPass& pass) {
  const auto changes = (scale_shift_table_.to(at::kFloat) + pass.conditions.modulation).unbind(2);  // [B, S, C] each
  const auto normed = [&](const at::Tensor& x, size_t first) {
    return modulated_norm(x, {changes[first + 1] + 1, changes[first]}, pass.clean, eps_);
  };
  auto x = gated_sum(hidden, attn1_->forward(normed(hidden, 0), pass), changes[2], pass.clean);
  x = x + attn2_->forward(norm2_ ? norm2_->forward(x) : x, pass);
  return gated_sum(x, ffn_->forward(normed(x, 3)), changes[5], pass.clean);
}

WanControlBlock::WanControlBlock(const WanConfig& config, bool is_first) : WanTransformerBlock(config) {
  // They begin with zeros, as in VACE's own training.
  const Linear::Options options{.in = config.width(), .out = config.width(), .bias = true, .init_scale = 0};
  if (is_first) proj_in_ = register_module("proj_in", std::make_shared<Hooked<Linear>>(options));
  proj_out_ = register_module("proj_out", std::make_shared<Hooked<Linear>>(options));
}

ControlStates WanControlBlock::forward(const at::Tensor& control, const at::Tensor& hidden, const WanPass& pass) {
  const auto states = WanTransformerBlock::forward(proj_in_ ? proj_in_->forward(control) + hidden : control, pass);
  return {states, proj_out_->forward(states)};
}

void WanTransformerBlock::init_own_weights(const WeightInit& init) { init_table(scale_shift_table_, init); }

}  // namespace megashard
