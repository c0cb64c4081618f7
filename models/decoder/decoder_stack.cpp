#include "models/decoder/decoder_stack.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {
namespace {

/// hidden + branch, and the norm of the sum: in one pass if nothing else surrounds the norm's forward.
NormedSum normed_sum(const std::shared_ptr<Hooked<Norm>>& norm, const at::Tensor& hidden, const at::Tensor& branch) {
  if (norm != nullptr && norm->is_transparent()) return norm->forward_sum(hidden, branch);
  const auto sum = hidden + branch;
  return {sum, norm == nullptr ? sum : norm->forward(sum)};
}

}  // namespace

DecoderLayer::DecoderLayer(const LayerSpec& spec, const BuildContext& context)
    : class_name_(spec.class_name), dropout_(spec.dropout) {
  for (const auto& branch : spec.branches) {
    branches_.push_back({.part = branch.part->build(context), .before = {}, .after = {}});
    register_module(branch.name, branches_.back().part->module());
  }
  const auto norm = [&](const std::optional<NamedNorm>& each) {
    return each ? register_module(each->name, std::make_shared<Hooked<Norm>>(each->norm, context.tensor_parallel))
                : nullptr;
  };
  for (size_t i = 0; i < branches_.size(); ++i) {
    branches_[i].before = norm(spec.branches[i].before);
    branches_[i].after = norm(spec.branches[i].after);
  }
}

at::Tensor DecoderLayer::with_dropout(const at::Tensor& branch) const {
  return is_training() && dropout_ > 0 ? at::dropout(branch, dropout_, /*train=*/true) : branch;
}

LayerOutput DecoderLayer::forward(const at::Tensor& hidden, const Pass& pass) {
  LayerOutput output{.hidden = hidden};
  at::Tensor branch;  // output of the last part, not yet added
  for (const auto& each : branches_) {
    at::Tensor normed;
    if (branch.defined()) {
      auto both = normed_sum(each.before, output.hidden, branch);
      output.hidden = std::move(both.sum);
      normed = std::move(both.normed);
    } else {
      normed = each.before ? each.before->forward(output.hidden) : output.hidden;
    }
    auto result = each.part->run(normed, pass);
    if (result.balance.defined()) output.balance = std::move(result.balance);
    if (result.z.defined()) output.z = std::move(result.z);
    branch = with_dropout(each.after ? each.after->forward(result.hidden) : result.hidden);
  }
  output.hidden = output.hidden + branch;
  return output;
}

namespace {

/// As a weight of that dtype holds it: sqrt(1152) is 34 in bf16.
double rounded(double value, at::ScalarType dtype) {
  const auto single = static_cast<float>(value);
  if (dtype == at::kBFloat16) return static_cast<float>(c10::BFloat16(single));
  return dtype == at::kHalf ? static_cast<float>(c10::Half(single)) : single;
}

}  // namespace

DecoderStack::DecoderStack(const Network& network, const BuildContext& context)
    : class_name_(network.config.names.decoder),
      ranks_(context.tensor_parallel),
      dropout_(network.config.hidden_dropout),
      embedding_scale_(network.config.embedding_scale) {
  const auto& config = network.config;
  embed_tokens_ = register_module(
      "embed_tokens",
      std::make_shared<Hooked<Embedding>>(config.vocab_size, config.hidden_size, config.pad_token_id, ranks_));
  if (config.positions == PositionKind::kLearned) {
    embed_positions_ = register_module("embed_positions",
                                       std::make_shared<Hooked<Embedding>>(config.max_positions, config.hidden_size));
  }
  const auto layers = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (const auto& layer : network.layers) {
    layers_.push_back(std::make_shared<Hooked<DecoderLayer>>(layer, context));
    layers->push_back(layers_.back());
  }
  norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(network.norm, ranks_));
  for (const auto& rotary : network.rotaries) {
    rotaries_.push_back(std::make_shared<Hooked<RotaryEmbedding>>(config.names.rotary, config.head_dim, rotary));
    register_module(rotaries_.size() == 1 ? "rotary_emb" : "rotary_emb_local", rotaries_.back());
  }
}

at::Tensor DecoderStack::embed(const at::Tensor& tokens, const at::Tensor& positions,
                               const InjectedEmbeddings& injected) {
  auto hidden = embed_tokens_->forward(tokens);
  if (embedding_scale_ != 1) hidden = hidden * rounded(embedding_scale_, hidden.scalar_type());
  if (injected.features.defined()) {
    hidden = hidden.flatten(0, 1)
                 .index_copy(0, injected.token_indices, injected.features.to(hidden.scalar_type()))
                 .view(hidden.sizes());
  }
  if (embed_positions_) {
    hidden = hidden + ranks_->own_rows(embed_positions_->forward(
                          positions.defined() ? positions : at::arange(tokens.size(1), tokens.options()).unsqueeze(0)));
  }
  return is_training() && dropout_ > 0 ? at::dropout(hidden, dropout_, /*train=*/true) : hidden;
}

RotaryTables DecoderStack::rotate(Hooked<RotaryEmbedding>& rotary, const Batch& input, const at::Tensor& hidden,
                                  const at::Tensor& positions) const {
  const auto& sequence = input.sequence;
  const int64_t length = sequence.is_whole() ? input.tokens().size(1) : sequence.length;
  at::Tensor end;  // of positions that were given: of all ranks' rows
  if (rotary.depends_on_length() && input.position_ids().defined())
    end = whole_of_rows(positions, positions.dim() - 1, sequence).max() + 1;
  return rotary.forward(hidden, positions, length, end);
}

LayerOutput DecoderStack::forward(const Batch& input, const InjectedEmbeddings& injected) {
  const at::Tensor& tokens = input.tokens();
  TORCH_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong,
              "tokens must be int64 of sizes [batch, length], got ", tokens.scalar_type(), " ", tokens.sizes());
  auto positions = input.position_ids();
  if (!positions.defined() && !input.sequence.is_whole()) {
    positions = input.sequence.rows_of(at::arange(input.sequence.length, tokens.options()).unsqueeze(0), 1);
  }
  auto hidden = embed(tokens, positions, injected);
  const int64_t rows = tokens.size(0), length = tokens.size(1);
  const auto& sequence = input.sequence;
  Pass pass{.token_mask = input.token_mask(), .span = {.sequence = sequence}};
  pass.span.documents = Documents::of(input.document_lengths, rows, sequence.is_whole() ? length : sequence.length,
                                      sequence.ring != nullptr, hidden.device());
  for (const auto& rotary : rotaries_) pass.rotary.push_back(rotate(*rotary, input, hidden, positions));
  std::vector<at::Tensor> balance, z;  // layers with experts
  for (size_t i = 0; i < layers_.size(); ++i) {
    auto states = layers_[i]->forward(hidden, pass);
    hidden = std::move(states.hidden);
    if (states.balance.defined()) balance.push_back(std::move(states.balance));
    if (states.z.defined()) z.push_back(std::move(states.z));
    if (i >= injected.deepstack.size()) continue;
    hidden = hidden.flatten(0, 1)
                 .index_add(0, injected.token_indices, injected.deepstack[i].to(hidden.scalar_type()))
                 .view(hidden.sizes());
  }
  return {norm_->forward(hidden), balance.empty() ? at::Tensor() : at::stack(balance),
          z.empty() ? at::Tensor() : at::stack(z)};
}

EncodedStack::EncodedStack(const Network& network, const BuildContext& context)
    : class_name_(network.encoder->owner_class()), encoder_(network.encoder->build()) {
  register_module(network.encoder->name(), encoder_->module());
  language_model_ = register_module("language_model", std::make_shared<Hooked<DecoderStack>>(network, context));
}

LayerOutput EncodedStack::forward(const Batch& input) {
  return language_model_->forward(input, encoder_->encode(input));
}

}  // namespace megashard
