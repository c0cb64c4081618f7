#include "models/decoder/decoder_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>

namespace megashard {

DecoderLayer::DecoderLayer(const DecoderConfig& config, int64_t index)
    : class_name_(config.names.layer), dropout_(config.hidden_dropout) {
  self_attn_ = register_module("self_attn", std::make_shared<Hooked<Attention>>(config));
  if (config.moe.is_sparse(index)) {
    moe_ = register_module("mlp", std::make_shared<Hooked<SparseMoeBlock>>(config));
  } else {
    mlp_ = register_module("mlp", std::make_shared<Hooked<Mlp>>(config));
  }
  const auto norm = [&](const char* name) {
    return register_module(name, std::make_shared<Hooked<Norm>>(config, config.hidden_size));
  };
  input_layernorm_ = norm("input_layernorm");
  if (!config.sandwich_norms) {
    before_mlp_ = norm("post_attention_layernorm");
    return;
  }
  after_attention_ = norm("post_attention_layernorm");
  before_mlp_ = norm("pre_feedforward_layernorm");
  after_mlp_ = norm("post_feedforward_layernorm");
}

at::Tensor DecoderLayer::with_dropout(const at::Tensor& branch) const {
  return is_training() && dropout_ > 0 ? at::dropout(branch, dropout_, /*train=*/true) : branch;
}

NormedSum DecoderLayer::attended(const at::Tensor& hidden, const at::Tensor& attention) {
  // What surrounds the norm's forward alone (a unit of its own, recompute) is not for the sum.
  const bool alone = before_mlp_->forward_hooks() != nullptr || before_mlp_->forward_runner() != nullptr;
  if (!alone) return before_mlp_->forward_sum(hidden, attention);
  const auto sum = hidden + attention;
  return {sum, before_mlp_->forward(sum)};
}

RoutedStates DecoderLayer::forward(const at::Tensor& hidden, const LayerContext& context) {
  auto attention = self_attn_->forward(input_layernorm_->forward(hidden), context);
  if (after_attention_) attention = after_attention_->forward(attention);
  const auto [sum, normed] = attended(hidden, with_dropout(attention));
  auto states = mlp_ ? RoutedStates{mlp_->forward(normed), {}, {}} : moe_->forward(normed, context.token_mask);
  if (after_mlp_) states.hidden = after_mlp_->forward(states.hidden);
  return {sum + with_dropout(states.hidden), states.balance, states.z};
}

}  // namespace megashard
