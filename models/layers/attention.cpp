#include "models/layers/attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include "models/kernels/fused_ops.h"

namespace megashard {

at::Tensor CoreAttention::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& mask) {
  const bool by_fp32 = by_way_of_fp32(q);
  const auto heads_first = [&](const at::Tensor& x) { return (by_fp32 ? x.to(at::kFloat) : x).transpose(1, 2); };
  const auto out = at::scaled_dot_product_attention(
      heads_first(q), heads_first(k), heads_first(v), mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt,
      is_training() ? dropout_ : 0.0,
      /*is_causal=*/!mask.defined(), scale_, /*enable_gqa=*/q.size(2) != k.size(2));
  return out.transpose(1, 2).to(q.scalar_type());
}

Attention::Attention(const DecoderConfig& config)
    : class_name_(config.names.attention),
      num_heads_(config.num_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim) {
  const auto projection = [this](const char* name, const Linear::Options& options) {
    return register_module(name, std::make_shared<Hooked<Linear>>(options));
  };
  const int64_t hidden = config.hidden_size;
  const int64_t queries = num_heads_ * head_dim_;
  const int64_t keys = num_kv_heads_ * head_dim_;
  q_proj_ = projection("q_proj", {.in = hidden, .out = queries, .bias = config.qkv_bias});
  k_proj_ = projection("k_proj", {.in = hidden, .out = keys, .bias = config.qkv_bias});
  v_proj_ = projection("v_proj", {.in = hidden, .out = keys, .bias = config.qkv_bias});
  o_proj_ = projection(
      "o_proj",
      {.in = queries, .out = hidden, .bias = config.attention_out_bias, .init_scale = config.output_init_scale});
  core_attention_ = register_module("core_attention", std::make_shared<Hooked<CoreAttention>>(config));
  if (!config.qk_norm) return;
  q_norm_ = register_module("q_norm", std::make_shared<Hooked<Norm>>(config, head_dim_));
  k_norm_ = register_module("k_norm", std::make_shared<Hooked<Norm>>(config, head_dim_));
}

at::Tensor Attention::forward(const at::Tensor& hidden, const LayerContext& context) {
  const int64_t batch = hidden.size(0);
  const int64_t length = hidden.size(1);
  auto q = q_proj_->forward(hidden).view({batch, length, num_heads_, head_dim_});
  auto k = k_proj_->forward(hidden).view({batch, length, num_kv_heads_, head_dim_});
  const auto v = v_proj_->forward(hidden).view({batch, length, num_kv_heads_, head_dim_});
  if (q_norm_) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  if (context.rotary.cos.defined()) {
    q = rotate(q, context.rotary.cos, context.rotary.sin);
    k = rotate(k, context.rotary.cos, context.rotary.sin);
  }
  const auto& shard = context.sequence;
  if (!shard.is_whole()) {
    const int64_t ranks = shard.group->size();
    auto whole = gather_sequence({q, spread_heads(k, ranks), spread_heads(v, ranks)}, shard);
    const auto mixed = core_attention_->forward(whole[0], whole[1], whole[2], context.attention_mask);
    return o_proj_->forward(scatter_sequence(mixed, shard).flatten(2));
  }
  const auto mixed = core_attention_->forward(q, k, v, context.attention_mask);
  return o_proj_->forward(mixed.reshape({batch, length, num_heads_ * head_dim_}));
}

}  // namespace megashard
