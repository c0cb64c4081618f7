#include "models/layers/decoder_layer.h"

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
  input_layernorm_ = register_module("input_layernorm", std::make_shared<Hooked<Norm>>(config, config.hidden_size));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm", std::make_shared<Hooked<Norm>>(config, config.hidden_size));
}

at::Tensor DecoderLayer::add_branch(const at::Tensor& residual, const at::Tensor& branch) const {
  if (is_training() && dropout_ > 0) return residual + at::dropout(branch, dropout_, /*train=*/true);
  return residual + branch;
}

RoutedStates DecoderLayer::forward(const at::Tensor& hidden, const LayerContext& context) {
  const auto attended = add_branch(hidden, self_attn_->forward(input_layernorm_->forward(hidden), context));
  const auto normed = post_attention_layernorm_->forward(attended);
  if (mlp_) return {add_branch(attended, mlp_->forward(normed)), {}};
  const auto routed = moe_->forward(normed, context.token_mask);
  return {add_branch(attended, routed.hidden), routed.balance};
}

}  // namespace megashard
