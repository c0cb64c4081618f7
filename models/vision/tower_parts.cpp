#include "models/vision/tower_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include "models/kernels/fused_ops.h"
#include "parallel/copies/on_device.h"

namespace megashard {

RotaryTables vision_tables(const at::Tensor& frequencies, const at::Tensor& positions) {
  const at::NoGradGuard no_grad;
  const auto angles = (positions.to(at::kFloat).unsqueeze(-1) * frequencies).flatten(1);
  return {angles.cos(), angles.sin()};
}

at::Tensor attend_within(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Segments& segments) {
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

PatchConvolution::PatchConvolution(at::IntArrayRef sizes, bool has_bias) {
  weight = register_parameter("weight", at::empty(sizes));
  if (has_bias) bias = register_parameter("bias", at::empty({sizes[0]}));
}

at::Tensor PatchConvolution::forward(const at::Tensor& patches) {
  return linear(patches.to(weight.scalar_type()), weight.flatten(1), bias);
}

void PatchConvolution::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std, init.generator);
  if (bias.defined()) bias.zero_();
}

at::Tensor in_tower_order(const at::Tensor& patches, const VisionPlan& plan) {
  if (!plan.unit_order.defined()) return patches;
  const auto units = patches.unflatten(0, {plan.features, -1});
  return units.index_select(0, on_device(plan.unit_order, patches.device())).flatten(0, 1);
}

at::Tensor in_given_order(const at::Tensor& features, const VisionPlan& plan) {
  if (!plan.unit_inverse.defined()) return features;
  return features.index_select(0, on_device(plan.unit_inverse, features.device()));
}

Segments on_device(const Segments& segments, c10::Device device) {
  const auto here = [&](const at::Tensor& x) { return x.defined() ? on_device(x, device) : x; };
  return {segments.runs, here(segments.order), here(segments.inverse)};
}

PlainMlp::PlainMlp(const PlainMlpSpec& spec) : class_name_(spec.class_name), activation_(spec.activation) {
  const auto layer = [&](const std::string& name, int64_t in, int64_t out) {
    return register_module(name, std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out, .bias = true}));
  };
  fc1_ = layer(spec.names[0], spec.hidden_size, spec.intermediate_size);
  fc2_ = layer(spec.names[1], spec.intermediate_size, spec.hidden_size);
}

at::Tensor PlainMlp::forward(const at::Tensor& hidden) {
  return fc2_->forward(activate(fc1_->forward(hidden), activation_));
}

TowerAttention::TowerAttention(const TowerLayerSpec& spec)
    : class_name_(spec.attention_class), num_heads_(spec.num_heads) {
  const Linear::Options options{.in = spec.norm.width, .out = spec.norm.width, .bias = spec.attention_bias};
  JointLinears::Layers projections;
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    projections.push_back(register_module(
        name, std::make_shared<Hooked<ColumnParallelLinear>>(options, std::make_shared<TensorParallelRanks>())));
  }
  projections_ = JointLinears(std::move(projections));
  out_proj_ = register_module(spec.out_proj, std::make_shared<Hooked<Linear>>(options));
}

at::Tensor TowerAttention::forward(const at::Tensor& hidden, const VisionContext& context) {
  std::vector<at::Tensor> heads;
  for (const auto& rows : projections_.forward(hidden)) heads.push_back(rows.unflatten(1, {num_heads_, -1}));
  if (const auto& [cos, sin] = context.rotary; cos.defined()) {
    for (size_t i = 0; i < 2; ++i) heads[i] = rotate(heads[i].unsqueeze(0), cos, sin).squeeze(0);
  }
  return out_proj_->forward(attend_within(heads[0], heads[1], heads[2], context.segments).flatten(1));
}

TowerLayer::TowerLayer(const TowerLayerSpec& spec) : class_name_(spec.class_name) {
  for (size_t i = 0; i < 2; ++i) norms_[i] = register_module(spec.norms[i], std::make_shared<Hooked<Norm>>(spec.norm));
  attention_ = register_module(spec.parts[0], std::make_shared<Hooked<TowerAttention>>(spec));
  if (const auto* gated = std::get_if<MlpSpec>(&spec.mlp)) {
    gated_mlp_ = register_module(spec.parts[1], std::make_shared<Hooked<Mlp>>(*gated));
  } else {
    mlp_ = register_module(spec.parts[1], std::make_shared<Hooked<PlainMlp>>(std::get<PlainMlpSpec>(spec.mlp)));
  }
}

at::Tensor TowerLayer::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto attended = hidden + attention_->forward(norms_[0]->forward(hidden), context);
  const auto normed = norms_[1]->forward(attended);
  return attended + (mlp_ ? mlp_->forward(normed) : gated_mlp_->forward(normed));
}

TowerStack::TowerStack(std::string class_name, const TowerLayerSpec& layer, int64_t depth)
    : class_name_(std::move(class_name)) {
  const auto layers = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < depth; ++i) {
    layers_.push_back(std::make_shared<Hooked<TowerLayer>>(layer));
    layers->push_back(layers_.back());
  }
}

at::Tensor TowerStack::forward(at::Tensor hidden, const VisionContext& context) {
  for (const auto& layer : layers_) hidden = layer->forward(hidden, context);
  return hidden;
}

}  // namespace megashard
