#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "models/layers/attention.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/moe/moe.h"

namespace megashard {

/// x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches. With sandwich norms
/// (Gemma) x + norm(attention(norm(x))), and so the MLP; post_attention_layernorm then is the norm
/// behind attention and not, as elsewhere, the one in front of the MLP.
class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const DecoderConfig& config, int64_t index);

  RoutedStates forward(const at::Tensor& hidden, const LayerContext& context);  // [B, T, C]
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<SparseMoeBlock>>& experts() const { return moe_; }  ///< or null

 private:
  at::Tensor with_dropout(const at::Tensor& branch) const;
  /// hidden + attention, and the norm of it in front of the MLP.
  NormedSum attended(const at::Tensor& hidden, const at::Tensor& attention);

  std::string class_name_;
  double dropout_;
  std::shared_ptr<Hooked<Attention>> self_attn_;
  std::shared_ptr<Hooked<Mlp>> mlp_;             // one of the two,
  std::shared_ptr<Hooked<SparseMoeBlock>> moe_;  // which is `mlp` in names
  std::shared_ptr<Hooked<Norm>> input_layernorm_, before_mlp_;
  std::shared_ptr<Hooked<Norm>> after_attention_, after_mlp_;  // sandwich norms
};

}  // namespace megashard
