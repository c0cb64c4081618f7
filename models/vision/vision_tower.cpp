#include "models/vision/vision_tower.h"

#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <array>

#include "models/kernels/fused_ops.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

std::shared_ptr<Hooked<Norm>> norm_of(const VisionConfig& config, int64_t width) {
  const auto kind = config.kind == VisionKind::kQwen3 ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  return std::make_shared<Hooked<Norm>>(
      NormSpec{.class_name = config.names.norm, .width = width, .kind = kind, .eps = config.norm_eps});
}

std::shared_ptr<Hooked<Linear>> with_bias(int64_t in, int64_t out) {
  return std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out, .bias = true});
}

}  // namespace

PatchEmbed::PatchEmbed(const VisionConfig& config) : class_name_(config.names.patch_embed) {
  const std::array sizes{config.hidden_size, config.in_channels, config.temporal_patch_size, config.patch_size,
                         config.patch_size};
  proj_ =
      register_module("proj", std::make_shared<Hooked<PatchConvolution>>(sizes, config.kind != VisionKind::kQwen2_5));
}

VisionAttention::VisionAttention(const VisionConfig& config)
    : class_name_(config.names.attention), num_heads_(config.num_heads) {
  const int64_t width = config.hidden_size;
  const auto layer = [&](const char* name, int64_t out, bool bias) {
    return register_module(name,
                           std::make_shared<Hooked<Linear>>(Linear::Options{.in = width, .out = out, .bias = bias}));
  };
  qkv_ = layer("qkv", 3 * width, config.qkv_bias);
  proj_ = layer("proj", width, config.block_bias);
}

at::Tensor VisionAttention::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto qkv = qkv_->forward(hidden).unflatten(1, {3, num_heads_, -1});  // [P, 3, H, D]
  const auto turned = [&](int64_t which) {
    const auto x = qkv.select(1, which).unsqueeze(0).to(context.rotary.cos.scalar_type());
    return rotate(x, context.rotary.cos, context.rotary.sin).squeeze(0).to(qkv.scalar_type());
  };
  const auto mixed = attend_within(turned(0), turned(1), qkv.select(1, 2), context.segments);
  return proj_->forward(mixed.flatten(1));
}

VisionBlock::VisionBlock(const VisionConfig& config) : class_name_(config.names.block) {
  norm1_ = register_module("norm1", norm_of(config, config.hidden_size));
  norm2_ = register_module("norm2", norm_of(config, config.hidden_size));
  attn_ = register_module("attn", std::make_shared<Hooked<VisionAttention>>(config));
  if (config.kind != VisionKind::kQwen3) {
    gated_mlp_ = register_module("mlp", std::make_shared<Hooked<Mlp>>(MlpSpec{
                                            .class_name = config.names.mlp,
                                            .hidden_size = config.hidden_size,
                                            .intermediate_size = config.intermediate_size,
                                            .activation = config.activation,
                                            .bias = config.block_bias,
                                        }));
  } else {
    mlp_ = register_module("mlp", std::make_shared<Hooked<PlainMlp>>(PlainMlpSpec{
                                      .class_name = config.names.mlp,
                                      .names = {"linear_fc1", "linear_fc2"},
                                      .hidden_size = config.hidden_size,
                                      .intermediate_size = config.intermediate_size,
                                      .activation = config.activation,
                                  }));
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
  const bool old = config.numbered_mergers;
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
  const auto mergers = register_module(config.deepstack_list, std::make_shared<torch::nn::ModuleListImpl>());
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
  const auto device = patches.device();
  auto hidden = in_tower_order(patch_embed_->forward(patches), plan);
  if (pos_embed_) hidden = hidden + learned_positions(plan, hidden);

  if (!frequencies_.defined() || frequencies_.device() != device) {
    const int64_t head = config_.hidden_size / config_.num_heads;
    const c10::InferenceMode no_inference(false);  // training may use them later
    frequencies_ = on_device(inverse_frequencies({.theta = config_.rotary_theta}, head / 2), device);
  }
  const auto rotary = vision_tables(frequencies_, on_device(plan.positions, device));
  const VisionContext by_frame{rotary, on_device(plan.frames, device)};
  const VisionContext by_window{rotary, on_device(plan.windows, device)};
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
    out.deepstack[level] = in_given_order(deepstack_mergers_[level]->forward(hidden), plan);
  }
  out.features = in_given_order(merger_->forward(hidden), plan);
  return out;
}

}  // namespace megashard
