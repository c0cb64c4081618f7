#include "models/layers/mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "models/kernels/fused_ops.h"
#include "models/layers/tiled_mlp.h"

namespace megashard {

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kSquaredRelu:
      return at::relu(x).square();
  }
  TORCH_INTERNAL_ASSERT(false, "activation without a body");
}

std::shared_ptr<Hooked<Mlp>> Mlp::expert(const DecoderConfig& config) {
  return std::make_shared<Hooked<Mlp>>(config, config.moe.intermediate_size, Linear::Cut::kInputsOfSums);
}

Mlp::Mlp(const DecoderConfig& config, int64_t intermediate_size, Linear::Cut cut_of_down)
    : class_name_(config.names.mlp), activation_(config.activation), tiles_(config.mlp_tiles) {
  if (cut_of_down == Linear::Cut::kInputs) ranks_ = config.tensor_parallel;
  const Linear::Options widen{.in = config.hidden_size,
                              .out = intermediate_size,
                              .bias = config.mlp_bias,
                              .cut = Linear::Cut::kOutputs,
                              .ranks = config.tensor_parallel};
  std::vector<std::shared_ptr<Hooked<Linear>>> widening;
  if (config.gated_mlp) widening.push_back(register_module("gate_proj", std::make_shared<Hooked<Linear>>(widen)));
  widening.push_back(register_module("up_proj", std::make_shared<Hooked<Linear>>(widen)));
  widening_ = JointLinears(std::move(widening));
  down_proj_ = register_module(
      "down_proj", std::make_shared<Hooked<Linear>>(Linear::Options{.in = intermediate_size,
                                                                    .out = config.hidden_size,
                                                                    .bias = config.mlp_bias,
                                                                    .init_scale = config.output_init_scale,
                                                                    .cut = cut_of_down,
                                                                    .ranks = config.tensor_parallel}));
}

at::Tensor Mlp::forward(const at::Tensor& own) {
  if (ranks_ == nullptr) return of_rows(own);  // an expert's rows are few and not a sequence
  const auto hidden = ranks_->enter(own);
  if (tiles_ == 1) return of_rows(hidden);
  auto self = shared_from_this();  // the graph may outlive the model
  const auto body = [this, self = std::move(self)](const at::Tensor& rows) { return of_rows(rows); };
  return tiled_rows(body, hidden, parameters(), tiles_);
}

at::Tensor Mlp::of_rows(const at::Tensor& hidden) {
  const auto wide = widening_.forward(hidden);
  if (is_swiglu() && is_without_hooks(*down_proj_)) return down_proj_->forward_of_swiglu(wide[0], wide[1]);
  return down_proj_->forward(activated(wide));
}

at::Tensor Mlp::activated(const std::vector<at::Tensor>& wide) const {
  if (is_swiglu()) return swiglu(wide[0], wide[1]);
  const auto active = activate(wide[0], activation_);
  return wide.size() == 1 ? active : active * wide[1];
}

}  // namespace megashard
