#include "models/decoder/prediction_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>

#include <utility>
#include <vector>

#include "models/kernels/cross_entropy.h"
#include "models/network/prediction_files.h"

namespace megashard {

PredictionLayer::PredictionLayer(const Network& network, const LayerSpec& layer, const BuildContext& context) {
  const auto& ranks = context.tensor_parallel;
  const auto norm = [&](const char* name, const NormSpec& spec) {
    return register_module(name, std::make_shared<Hooked<Norm>>(spec, ranks));
  };
  const int64_t width = network.config.hidden_size;
  enorm_ = norm("enorm", hidden_norm(network.config));
  hnorm_ = norm("hnorm", hidden_norm(network.config));
  eh_proj_ = register_module(
      "eh_proj", std::make_shared<Hooked<ReplicatedLinear>>(Linear::Options{.in = 2 * width, .out = width}, ranks));
  transformer_layer_ = register_module(kTransformerLayer, std::make_shared<Hooked<DecoderLayer>>(layer, context));
  final_layernorm_ = norm("final_layernorm", network.norm);
}

LayerOutput PredictionLayer::forward(const at::Tensor& states, const at::Tensor& embedded, const Pass& pass) {
  const auto both = at::cat({enorm_->forward(embedded), hnorm_->forward(states)}, -1);
  auto output = transformer_layer_->forward(eh_proj_->forward(both), pass);
  output.hidden = final_layernorm_->forward(output.hidden);
  return output;
}

namespace {

/// [B, T] int64: the end of each token's document in its row.
at::Tensor document_ends(const Batch& batch) {
  const auto& tokens = batch.tokens();
  const int64_t length = tokens.size(1);
  const auto& lengths = batch.document_lengths;
  if (!lengths.defined()) return at::full_like(tokens, length);
  const auto ends = at::repeat_interleave(lengths.cumsum(0), lengths).view(tokens.sizes());
  return ends - at::arange(tokens.size(0), tokens.options()).unsqueeze(1) * length;
}

}  // namespace

void add_later_tokens(Batch& batch, int64_t depth) {
  const auto &tokens = batch.tokens(), labels = batch.labels();
  const int64_t length = tokens.size(1);
  const auto ends = document_ends(batch);
  auto mask = batch.find(kLossMask);
  if (!mask.defined()) mask = labels.ne(kIgnoredLabel).to(at::kFloat);
  std::vector<at::Tensor> later_tokens, later_labels, later_mask;
  for (int64_t k = 0; k < depth; ++k) {
    const auto places = (at::arange(length, tokens.options()) + (k + 1)).expand_as(tokens);
    const auto beyond = places.ge(ends);
    const auto shifted = [&](const at::Tensor& column, const at::Scalar& end) {
      return column.gather(1, places.clamp_max(length - 1)).masked_fill(beyond, end);
    };
    later_tokens.push_back(shifted(tokens, 0));
    later_labels.push_back(shifted(labels, kIgnoredLabel));
    later_mask.push_back(shifted(mask, 0));
  }
  const auto masks = at::stack(later_mask);
  batch.set(kLaterTokens, at::stack(later_tokens), Axis::kToken, /*is_input=*/false);
  batch.set(kLaterLabels, at::stack(later_labels), Axis::kToken, /*is_input=*/false);
  batch.set(kLaterMask, masks, Axis::kToken, /*is_input=*/false);
  batch.set(kLaterCounts, masks.sum(2).t(), Axis::kRow, /*is_input=*/false);
}

}  // namespace megashard
