#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "models/layers/norm.h"
#include "models/layers/vocabulary.h"
#include "models/network/encoder.h"
#include "models/network/network.h"

namespace megashard {

/// The residual branches of a LayerSpec.
class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const LayerSpec& spec, const BuildContext& context);

  LayerOutput forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C]
  std::string class_name() const { return class_name_; }

 private:
  struct BuiltBranch {
    std::shared_ptr<Part> part;
    std::shared_ptr<Hooked<Norm>> before, after;  // null: none
  };

  at::Tensor with_dropout(const at::Tensor& branch) const;

  std::string class_name_;
  double dropout_;
  std::vector<BuiltBranch> branches_;
};

/// Maps token ids to normed hidden states: embed_tokens (and embed_positions), layers, norm, rotary_emb (and
/// rotary_emb_local, for sliding layers).
class DecoderStack : public torch::nn::Module {
 public:
  DecoderStack(const Network& network, const BuildContext& context);

  /// tokens, position_ids and masks of a Batch -> [B, T, C].
  LayerOutput forward(const Batch& input, const InjectedEmbeddings& injected);
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Hooked<Embedding>>& embed_tokens() const { return embed_tokens_; }

 private:
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions, const InjectedEmbeddings& injected);
  /// Tables for `positions`, those of this rank's rows.
  RotaryTables rotate(Hooked<RotaryEmbedding>& rotary, const Batch& input, const at::Tensor& hidden,
                      const at::Tensor& positions) const;

  std::string class_name_;
  TensorParallelRanksPtr ranks_;
  double dropout_;
  double embedding_scale_;
  std::shared_ptr<Hooked<Embedding>> embed_tokens_, embed_positions_;
  std::vector<std::shared_ptr<Hooked<DecoderLayer>>> layers_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::vector<std::shared_ptr<Hooked<RotaryEmbedding>>> rotaries_;
};

/// `model` of a network with an encoder: the encoder, and the decoder `language_model`, in which its features take the
/// places of their tokens.
class EncodedStack : public torch::nn::Module {
 public:
  EncodedStack(const Network& network, const BuildContext& context);

  LayerOutput forward(const Batch& input);  // [B, T, C]
  std::string class_name() const { return class_name_; }
  const std::shared_ptr<Encoder>& encoder() const { return encoder_; }
  const std::shared_ptr<Hooked<DecoderStack>>& language_model() const { return language_model_; }

 private:
  std::string class_name_;
  std::shared_ptr<Encoder> encoder_;
  std::shared_ptr<Hooked<DecoderStack>> language_model_;
};

}  // namespace megashard
