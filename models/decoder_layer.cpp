#include "models/decoder_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>

namespace megashard {

DecoderLayer::DecoderLayer(const DecoderConfig& config)
    : class_name_(config.names.layer),
      dropout_(config.hidden_dropout),
      residual_after_norm_(config.residual_after_norm) {
  self_attn_ = register_module("self_attn", std::make_shared<Hooked<Attention>>(config));
  mlp_ = register_module("mlp", std::make_shared<Hooked<Mlp>>(config));
  input_layernorm_ = register_module("input_layernorm",
                                     std::make_shared<Hooked<Norm>>(config, config.hidden_size));
  post_attention_layernorm_ = register_module(
      "post_attention_layernorm", std::make_shared<Hooked<Norm>>(config, config.hidden_size));
}

at::Tensor DecoderLayer::add_branch(const at::Tensor& residual, const at::Tensor& branch) const {
  if (is_training() && dropout_ > 0)
    return residual + at::dropout(branch, dropout_, /*train=*/true);
  return residual + branch;
}

at::Tensor DecoderLayer::forward(const at::Tensor& hidden, const LayerContext& context) {
  const auto first = input_layernorm_->forward(hidden);
  const auto attended =
      add_branch(residual_after_norm_ ? first : hidden, self_attn_->forward(first, context));
  const auto second = post_attention_layernorm_->forward(attended);
  return add_branch(residual_after_norm_ ? second : attended, mlp_->forward(second));
}

}  // namespace megashard
