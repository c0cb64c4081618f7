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

at::Tensor interpolated_positions(const at::Tensor& table, const at::Tensor& hidden, const VisionPlan& plan) {
  const auto taps = on_device(plan.taps, hidden.device());
  const auto weights = on_device(plan.tap_weights, hidden.device()).to(table.scalar_type()).unsqueeze(-1);
  const auto rows = table.index_select(0, taps.flatten()).unflatten(0, taps.sizes());  // [P, taps, C]
  return hidden + (rows * weights).sum(1).to(hidden.scalar_type());
}

at::Tensor turned_neighbours(const at::Tensor& x, const RotaryTables& rotary) {
  const auto halves = x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
  const auto turned = rotate(halves.unsqueeze(0).to(rotary.cos.scalar_type()), rotary.cos, rotary.sin);
  return turned.squeeze(0).to(x.scalar_type());
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
  const int64_t width = spec.norm.width;
  const Linear::Options options{.in = width, .out = width, .bias = spec.qkv_bias};
  JointLinears::Layers projections;
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    projections.push_back(register_module(
        name, std::make_shared<Hooked<ColumnParallelLinear>>(options, std::make_shared<TensorParallelRanks>())));
  }
  projections_ = JointLinears(std::move(projections));
  for (size_t i = 0; spec.qk_norm && i < 2; ++i)
    qk_norms_[i] = register_module(i == 0 ? "q_norm" : "k_norm", std::make_shared<Hooked<Norm>>(*spec.qk_norm));
  out_proj_ = register_module(spec.out_proj, std::make_shared<Hooked<Linear>>(
                                                 Linear::Options{.in = width, .out = width, .bias = spec.out_bias}));
}

at::Tensor TowerAttention::forward(const at::Tensor& hidden, const VisionContext& context) {
  std::vector<at::Tensor> heads;
  for (auto rows : projections_.forward(hidden)) {
    if (heads.size() < 2 && qk_norms_[0]) rows = qk_norms_[heads.size()]->forward(rows);
    heads.push_back(rows.unflatten(1, {num_heads_, -1}));
  }
  if (const auto& [cos, sin] = context.rotary; cos.defined()) {
    for (size_t i = 0; i < 2; ++i) heads[i] = rotate(heads[i].unsqueeze(0), cos, sin).squeeze(0);
  }
  return out_proj_->forward(attend_within(heads[0], heads[1], heads[2], context.segments).flatten(1));
}

TowerLayer::TowerLayer(const TowerLayerSpec& spec)
    : class_name_(spec.class_name), first_scale_(spec.first_scale), drop_path_(spec.drop_path) {
  for (size_t i = 0; i < 2; ++i) {
    if (!spec.scales[i].empty()) scales_[i] = register_parameter(spec.scales[i], at::empty({spec.norm.width}));
  }
  for (size_t i = 0; i < 2; ++i) norms_[i] = register_module(spec.norms[i], std::make_shared<Hooked<Norm>>(spec.norm));
  attention_ = register_module(spec.parts[0], std::make_shared<Hooked<TowerAttention>>(spec));
  if (const auto* gated = std::get_if<MlpSpec>(&spec.mlp)) {
    gated_mlp_ = register_module(spec.parts[1], std::make_shared<Hooked<Mlp>>(*gated));
  } else {
    mlp_ = register_module(spec.parts[1], std::make_shared<Hooked<PlainMlp>>(std::get<PlainMlpSpec>(spec.mlp)));
  }
}

at::Tensor TowerLayer::forward(const at::Tensor& hidden, const VisionContext& context) {
  const auto attended = add(hidden, attention_->forward(norms_[0]->forward(hidden), context), 0, context.segments);
  const auto normed = norms_[1]->forward(attended);
  return add(attended, mlp_ ? mlp_->forward(normed) : gated_mlp_->forward(normed), 1, context.segments);
}

at::Tensor TowerLayer::add(const at::Tensor& hidden, at::Tensor branch, size_t index, const Segments& segments) const {
  if (scales_[index].defined()) branch = branch * scales_[index];
  if (!is_training() || drop_path_ == 0) return hidden + branch;
  TORCH_INTERNAL_ASSERT(segments.runs.size() == 1 && !segments.order.defined());  // pictures of one size
  const auto [length, count] = segments.runs[0];
  const double kept = 1 - drop_path_;
  const auto factors = at::empty({count, 1, 1}, branch.options().requires_grad(false)).bernoulli_(kept).div_(kept);
  return hidden + (branch.unflatten(0, {count, length}) * factors).flatten(0, 1);
}

void TowerLayer::init_own_weights(const WeightInit&) {
  for (const auto& scale : scales_) {
    if (scale.defined()) scale.fill_(first_scale_);
  }
}

TowerStack::TowerStack(std::string class_name, TowerLayerSpec layer, int64_t depth, const std::string& list)
    : class_name_(std::move(class_name)) {
  const auto layers = register_module(list, std::make_shared<torch::nn::ModuleListImpl>());
  const double drop_path = layer.drop_path;
  for (int64_t i = 0; i < depth; ++i) {
    layer.drop_path = depth == 1 ? 0 : drop_path * static_cast<double>(i) / static_cast<double>(depth - 1);
    layers_.push_back(std::make_shared<Hooked<TowerLayer>>(layer));
    layers->push_back(layers_.back());
  }
}

at::Tensor TowerStack::forward(at::Tensor hidden, const VisionContext& context) {
  for (const auto& layer : layers_) hidden = layer->forward(hidden, context);
  return hidden;
}

}  // namespace megashard
