#include "models/vision/vision_tower.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>

#include "models/kernels/fused_ops.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

std::shared_ptr<Hooked<Norm>> norm_of(const VisionConfig& config, int64_t width) {
  const auto kind = config.kind == VisionKind::kQwen2_5 ? NormKind::kRmsNorm : NormKind::kLayerNorm;
  return std::make_shared<Hooked<Norm>>(
      NormSpec{.class_name = config.names.norm, .width = width, .kind = kind, .eps = config.norm_eps});
}

std::shared_ptr<Hooked<Linear>> with_bias(int64_t in, int64_t out) {
  return std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out, .bias = true});
}

/// The tables of row and column: a quarter of the head's channel pairs each.
RotaryTables tables_of(const at::Tensor& frequencies, const at::Tensor& positions) {
  const at::NoGradGuard no_grad;
  const auto angles = (positions.to(at::kFloat).unsqueeze(-1) * frequencies).flatten(1);
  return {angles.cos(), angles.sin()};
}

/// Attention of [P, H, D] within the segments, one call for all segments of a length.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Segments& segments) {
  const bool by_fp32 = by_way_of_fp32(q);
  const auto arranged = [&](const at::Tensor& x) {
    const auto ordered = segments.order.defined() ? x.index_select(0, segments.order) : x;
    return by_fp32 ? ordered.to(at::kFloat) : ordered;
  };
  const auto queries = arranged(q), keys = arranged(k), values = arranged(v);
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (const auto& run : segments.runs) {
    const auto batch = [&](const at::Tensor& x) {  // [count, H, length, D]
      return x.narrow(0, first, run.count * run.length).unflatten(0, {run.count, run.length}).transpose(1, 2);
    };
    const auto out = at::scaled_dot_product_attention(batch(queries), batch(keys), batch(values));
    parts.push_back(out.transpose(1, 2).flatten(0, 1));
    first += run.count * run.length;
  }
  auto mixed = parts.size() == 1 ? parts[0] : at::cat(parts);
  if (segments.inverse.defined()) mixed = mixed.index_select(0, segments.inverse);
  return mixed.to(q.scalar_type());
}

}  // namespace

PatchConvolution::PatchConvolution(const VisionConfig& config) {
  weight = register_parameter("weight", at::empty({config.hidden_size, config.in_channels, config.temporal_patch_size,
                                                   config.patch_size, config.patch_size}));
  if (config.kind == VisionKind::kQwen3) bias = register_parameter("bias", at::empty({config.hidden_size}));
}

at::Tensor PatchConvolution::forward(const at::Tensor& patches) {
  return linear(patches.to(weight.scalar_type()), weight.flatten(1), bias);
}

void PatchConvolution::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std, init.generator);
  if (bias.defined()) bias.zero_();
}

PatchEmbed::PatchEmbed(const VisionConfig& config) : class_name_(config.names.patch_embed) {
  proj_ = register_module("proj", std::make_shared<Hooked<PatchConvolution>>(config));
}

VisionAttention::VisionAttention(const VisionConfig& config)
    : class_name_(config.names.attention), num_heads_(config.num_heads) {
  qkv_ = register_module("qkv", with_bias(config.hidden_size, 3 * config.hidden_size));
  proj_ = register_module("proj", with_bias(config.hidden_size, config.hidden_size));
}

at::Tensor VisionAttention::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto qkv = qkv_->forward(hidden).unflatten(1, {3, num_heads_, -1});  // [P, 3, H, D]
  const auto turned = [&](int64_t which) {
    const auto x = qkv.select(1, which).unsqueeze(0).to(context.rotary.cos.scalar_type());
    return rotate(x, context.rotary.cos, context.rotary.sin).squeeze(0).to(qkv.scalar_type());
  };
  const auto mixed = attend(turned(0), turned(1), qkv.select(1, 2), context.segments);
  return proj_->forward(mixed.flatten(1));
}

VisionMlp::VisionMlp(const VisionConfig& config) : class_name_(config.names.mlp), activation_(config.activation) {
  linear_fc1_ = register_module("linear_fc1", with_bias(config.hidden_size, config.intermediate_size));
  linear_fc2_ = register_module("linear_fc2", with_bias(config.intermediate_size, config.hidden_size));
}

at::Tensor VisionMlp::forward(const at::Tensor& hidden) {
  return linear_fc2_->forward(activate(linear_fc1_->forward(hidden), activation_));
}

VisionBlock::VisionBlock(const VisionConfig& config) : class_name_(config.names.block) {
  norm1_ = register_module("norm1", norm_of(config, config.hidden_size));
  norm2_ = register_module("norm2", norm_of(config, config.hidden_size));
  attn_ = register_module("attn", std::make_shared<Hooked<VisionAttention>>(config));
  if (config.kind == VisionKind::kQwen2_5) {
    gated_mlp_ = register_module("mlp", std::make_shared<Hooked<Mlp>>(MlpSpec{
                                            .class_name = config.names.mlp,
                                            .hidden_size = config.hidden_size,
                                            .intermediate_size = config.intermediate_size,
                                            .activation = config.activation,
                                            .bias = true,
                                        }));
  } else {
    mlp_ = register_module("mlp", std::make_shared<Hooked<VisionMlp>>(config));
  }
}

at::Tensor VisionBlock::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto attended = hidden + attn_->forward(norm1_->forward(hidden), context);
  const auto normed = norm2_->forward(attended);
  return attended + (mlp_ ? mlp_->forward(normed) : gated_mlp_->forward(normed));
}

PatchMerger::PatchMerger(const VisionConfig& config, bool norm_of_all)
    : class_name_(config.names.merger),
      width_(config.hidden_size * config.merge_size * config.merge_size),
      norm_of_all_(norm_of_all) {
  const bool old = config.kind == VisionKind::kQwen2_5;
  norm_ = register_module(old ? "ln_q" : "norm", norm_of(config, norm_of_all ? width_ : config.hidden_size));
  torch::nn::Module& owner = old ? *register_module("mlp", std::make_shared<torch::nn::Module>("Sequential")) : *this;
  first_ = owner.register_module(old ? "0" : "linear_fc1", with_bias(width_, width_));
  second_ = owner.register_module(old ? "2" : "linear_fc2", with_bias(width_, config.out_hidden_size));
}

at::Tensor PatchMerger::forward(const at::Tensor& hidden) {
  const auto rows =
      norm_of_all_ ? norm_->forward(hidden.reshape({-1, width_})) : norm_->forward(hidden).reshape({-1, width_});
  return second_->forward(activate(first_->forward(rows), Activation::kGelu));
}

VisionTower::VisionTower(const VisionConfig& config) : config_(config) {
  patch_embed_ = register_module("patch_embed", std::make_shared<Hooked<PatchEmbed>>(config));
  if (config.position_side > 0) {
    pos_embed_ = register_module("pos_embed", std::make_shared<Hooked<Embedding>>(
                                                  config.position_side * config.position_side, config.hidden_size));
  }
  const auto blocks = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.depth; ++i) {
    blocks_.push_back(std::make_shared<Hooked<VisionBlock>>(config));
    blocks->push_back(blocks_.back());
  }
  merger_ = register_module("merger", std::make_shared<Hooked<PatchMerger>>(config, /*norm_of_all=*/false));
  if (config.kind == VisionKind::kQwen2_5) return;
  const auto mergers = register_module("deepstack_merger_list", std::make_shared<torch::nn::ModuleListImpl>());
  for (size_t i = 0; i < config.deepstack_blocks.size(); ++i) {
    deepstack_mergers_.push_back(std::make_shared<Hooked<PatchMerger>>(config, /*norm_of_all=*/true));
    mergers->push_back(deepstack_mergers_.back());
  }
}

at::Tensor VisionTower::learned_positions(const VisionPlan& plan, const at::Tensor& hidden) {
  const auto here = [&](const at::Tensor& x) { return on_device(x, hidden.device()); };
  const auto rows = pos_embed_->forward(here(plan.taps));  // [P, 4, E]
  return (rows * here(plan.tap_weights).unsqueeze(-1)).sum(1).to(hidden.scalar_type());
}

VisionFeatures VisionTower::forward(const at::Tensor& patches, const VisionPlan& plan) {
  const int64_t unit = config_.merge_size * config_.merge_size;
  const auto here = [&](const at::Tensor& x) { return x.defined() ? on_device(x, patches.device()) : x; };
  const auto placed = [&](const Segments& from) { return Segments{from.runs, here(from.order), here(from.inverse)}; };
  auto hidden = patch_embed_->forward(patches);
  if (plan.unit_order.defined()) {
    hidden = hidden.unflatten(0, {-1, unit}).index_select(0, here(plan.unit_order)).flatten(0, 1);
  }
  if (pos_embed_) hidden = hidden + learned_positions(plan, hidden);

  if (!frequencies_.defined() || frequencies_.device() != patches.device()) {
    const int64_t head = config_.hidden_size / config_.num_heads;
    const c10::InferenceMode no_inference(false);  // training may use them later
    frequencies_ = here(inverse_frequencies({.theta = config_.rotary_theta}, head / 2));
  }
  const auto rotary = tables_of(frequencies_, here(plan.positions));
  const VisionContext by_frame{rotary, placed(plan.frames)};
  const VisionContext by_window{rotary, placed(plan.windows)};
  const auto as_given = [&](const at::Tensor& features) {
    return plan.unit_inverse.defined() ? features.index_select(0, here(plan.unit_inverse)) : features;
  };
  VisionFeatures out;
  out.deepstack.resize(deepstack_mergers_.size());
  const auto& full = config_.full_attention_blocks;
  const auto& deep = config_.deepstack_blocks;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    const bool windows = config_.window_size > 0 && std::find(full.begin(), full.end(), number) == full.end();
    hidden = blocks_[i]->forward(hidden, windows ? by_window : by_frame);
    const auto found = std::find(deep.begin(), deep.end(), number);
    if (found == deep.end()) continue;
    const auto level = static_cast<size_t>(found - deep.begin());
    out.deepstack[level] = as_given(deepstack_mergers_[level]->forward(hidden));
  }
  out.features = as_given(merger_->forward(hidden));
  return out;
}

}  // namespace megashard
