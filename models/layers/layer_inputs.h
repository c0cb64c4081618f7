#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "models/config/decoder_config.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/layers/part.h"

namespace megashard {

/// A token's inputs of each layer (transformers' Gemma4TextModel): (norm(projection(embedding) / sqrt(C)) +
/// embedding_per_layer(token) * sqrt(P)) / sqrt(2). The modules are the stack's own.
struct LayerInputs {
  /// Registers embed_tokens_per_layer, per_layer_model_projection and per_layer_projection_norm.
  LayerInputs(torch::nn::Module& stack, const DecoderConfig& config, NormSpec norm);

  /// tokens [B, T], embedded [B, T, C] -> [B, T, layers, P], Pass::layer_inputs.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& embedded);

  int64_t size;  ///< P
  std::shared_ptr<Hooked<Embedding>> embedding;
  std::shared_ptr<Hooked<Linear>> projection;
  std::shared_ptr<Hooked<Norm>> norm;
};

/// A branch that adds to a layer what its input says: per_layer_projection(act(per_layer_input_gate(x)) * input).
struct LayerInputSpec {
  std::string class_name{};
  int64_t hidden_size = 0, size = 0;
  int64_t layer = 0;  ///< index in Pass::layer_inputs
  Activation activation = Activation::kGeluTanh;
};

PartSpecPtr layer_input_part(LayerInputSpec spec);

}  // namespace megashard
