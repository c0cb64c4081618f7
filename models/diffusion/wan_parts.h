#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/diffusion/latent_parts.h"
#include "models/diffusion/wan_config.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Holds what a model makes of a batch's timesteps, text and pictures. S = 2 if some patches are given clean: the
/// second is that of timestep 0.
struct WanConditions {
  at::Tensor time;        // [B, S, C]
  at::Tensor modulation;  // [B, S, 6, C]
  at::Tensor text;        // [B, L, C]
  at::Tensor image{};     // [B, M, C]; undefined: none

  template <class F>
  void visit_tensors(F&& f) {
    f(time);
    f(modulation);
    f(text);
    f(image);
  }
};

/// Inputs that all blocks of a forward share.
struct WanPass {
  WanConditions conditions;
  at::Tensor turns;       // patch_turns
  at::Tensor clean{};     // [B, T] bool: patches that take the second modulation; undefined: S = 1
  at::Tensor key_mask{};  // [B, length] bool of the whole sequence; undefined: no padding
  SequenceShard sequence{};

  template <class F>
  void visit_tensors(F&& f) {
    conditions.visit_tensors(f);
    f(turns);
    f(clean);
    f(key_mask);
  }
};

/// Features of the image encoder: norm1, ff, norm2.
class WanImageEmbedding : public torch::nn::Module, public SelfInitializing {
 public:
  explicit WanImageEmbedding(const WanConfig& config);

  at::Tensor forward(const at::Tensor& features);  // [B, M, image_dim] -> [B, M, C]
  void init_own_weights(const WeightInit& init) override;

 private:
  std::shared_ptr<Hooked<Fp32LayerNorm>> norm1_, norm2_;
  std::shared_ptr<Hooked<FeedForward>> ff_;
  at::Tensor pos_embed_;  // [1, M, image_dim]; undefined: none
};

/// time_embedder, time_proj, text_embedder, and image_embedder if the model takes pictures.
class WanTimeTextImageEmbedding : public torch::nn::Module {
 public:
  explicit WanTimeTextImageEmbedding(const WanConfig& config);

  /// timesteps [B, S]; image may be undefined.
  WanConditions forward(const at::Tensor& timesteps, const at::Tensor& text, const at::Tensor& image);

 private:
  int64_t time_channels_;
  std::shared_ptr<Hooked<LatentMlp>> time_embedder_, text_embedder_;
  std::shared_ptr<Hooked<Linear>> time_proj_;
  std::shared_ptr<Hooked<WanImageEmbedding>> image_embedder_;  // null: none
};

/// Attention to the sequence itself, or to the text and the pictures: to_q, to_k, to_v, to_out.0, norm_q, norm_k; with
/// pictures add_k_proj, add_v_proj, norm_added_k.
class WanAttention : public torch::nn::Module {
 public:
  enum class Keys { kItself, kConditions };
  WanAttention(const WanConfig& config, Keys keys);

  at::Tensor forward(const at::Tensor& normed, const WanPass& pass);  // [B, T, C]

 private:
  at::Tensor heads(const at::Tensor& x) const { return x.unflatten(-1, {num_heads_, -1}); }

  Keys keys_;
  int64_t num_heads_;
  std::shared_ptr<Hooked<Linear>> to_q_, to_k_, to_v_, to_out_, add_k_proj_, add_v_proj_;
  std::shared_ptr<Hooked<Norm>> norm_q_, norm_k_, norm_added_k_;
};

/// attn1 to the sequence, attn2 to the conditions, ffn; scale_shift_table is added to the modulation.
class WanTransformerBlock : public torch::nn::Module, public SelfInitializing {
 public:
  explicit WanTransformerBlock(const WanConfig& config);

  at::Tensor forward(const at::Tensor& hidden, const WanPass& pass);  // [B, T, C]
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "WanTransformerBlock"; }

 private:
  double eps_;
  std::shared_ptr<Hooked<WanAttention>> attn1_, attn2_;
  std::shared_ptr<Hooked<Fp32LayerNorm>> norm2_;  // null: none
  std::shared_ptr<Hooked<FeedForward>> ffn_;
  at::Tensor scale_shift_table_;  // [1, 6, C]
};

/// Control states [B, T, C] behind a block, and what it adds to the hidden states of its layer.
struct ControlStates {
  at::Tensor states, addend;

  template <class F>
  void visit_tensors(F&& f) {
    f(states);
    f(addend);
  }
};

/// A block over VACE's control states, with proj_out, and the first one with proj_in.
class WanControlBlock : public WanTransformerBlock {
 public:
  WanControlBlock(const WanConfig& config, bool is_first);

  /// hidden [B, T, C]: the model's patches.
  ControlStates forward(const at::Tensor& control, const at::Tensor& hidden, const WanPass& pass);
  std::string class_name() const { return "WanVACETransformerBlock"; }

 private:
  std::shared_ptr<Hooked<Linear>> proj_in_, proj_out_;  // proj_in_: null if it is not the first
};

/// N(0, 1 / C) for a table [1, n, C].
void init_table(const at::Tensor& table, const WeightInit& init);

}  // namespace megashard
