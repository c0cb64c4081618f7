#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "framework/batch.h"
#include "models/decoder/decoder_layer.h"
#include "models/layers/linear.h"
#include "models/layers/norm.h"
#include "models/network/network.h"

namespace megashard {

/// Layer k of multi-token prediction (arXiv:2412.19437, section 2.2; megatron.core's MultiTokenPredictionLayer):
/// final_layernorm(transformer_layer(eh_proj([enorm(embedding), hnorm(states)]))). The head turns its output into
/// logits of the token k + 2 places on.
class PredictionLayer : public torch::nn::Module {
 public:
  PredictionLayer(const Network& network, const LayerSpec& layer, const BuildContext& context);

  /// `states` [B, T, C]: the normed output of the decoder, or of the prediction layer before; `embedded` [B, T, C]: of
  /// the tokens k + 1 places on.
  LayerOutput forward(const at::Tensor& states, const at::Tensor& embedded, const Pass& pass);
  std::string class_name() const { return "MultiTokenPredictionLayer"; }

 private:
  std::shared_ptr<Hooked<Norm>> enorm_, hnorm_, final_layernorm_;
  std::shared_ptr<Hooked<ReplicatedLinear>> eh_proj_;
  std::shared_ptr<Hooked<DecoderLayer>> transformer_layer_;
};

// The columns that prediction layers need; entry k belongs to layer k. A document's last tokens predict nothing.
inline constexpr const char* kLaterTokens = "mtp_tokens";  ///< [K, B, T] int64: the tokens k + 1 places on
inline constexpr const char* kLaterLabels = "mtp_labels";  ///< [K, B, T] int64: the labels k + 1 places on
inline constexpr const char* kLaterMask = "mtp_mask";      ///< [K, B, T] fp32: 1 for labels whose loss counts
inline constexpr const char* kLaterCounts = "mtp_counts";  ///< [B, K] fp32: their number in the whole sequence

/// Adds these columns to a batch in host memory with whole sequences and labels.
void add_later_tokens(Batch& batch, int64_t depth);

}  // namespace megashard
