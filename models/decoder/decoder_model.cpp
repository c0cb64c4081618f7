#include "models/decoder/decoder_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/nn/modules/container/modulelist.h>

#include "framework/modules/tie.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
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

at::Tensor DecoderStack::embed(const at::Tensor& tokens, const at::Tensor& positions, const VisualInput& visual) {
  auto hidden = embed_tokens_->forward(tokens);
  if (embedding_scale_ != 1) hidden = hidden * rounded(embedding_scale_, hidden.scalar_type());
  if (visual.features.defined()) {
    hidden = hidden.flatten(0, 1)
                 .index_copy(0, visual.token_indices, visual.features.to(hidden.scalar_type()))
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

LayerOutput DecoderStack::forward(const Batch& input, const VisualInput& visual) {
  const at::Tensor& tokens = input.tokens();
  TORCH_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong,
              "tokens must be int64 of sizes [batch, length], got ", tokens.scalar_type(), " ", tokens.sizes());
  auto positions = input.position_ids();
  if (!positions.defined() && !input.sequence.is_whole()) {
    positions = input.sequence.rows_of(at::arange(input.sequence.length, tokens.options()).unsqueeze(0), 1);
  }
  auto hidden = embed(tokens, positions, visual);
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
    if (i >= visual.deepstack.size()) continue;
    hidden = hidden.flatten(0, 1)
                 .index_add(0, visual.token_indices, visual.deepstack[i].to(hidden.scalar_type()))
                 .view(hidden.sizes());
  }
  return {norm_->forward(hidden), balance.empty() ? at::Tensor() : at::stack(balance),
          z.empty() ? at::Tensor() : at::stack(z)};
}

DecoderModel::DecoderModel(Network network, BuildContext context, WeightFiles weight_files)
    : network_(std::move(network)), context_(std::move(context)), weight_files_(weight_files) {
  const auto& config = network_.config;
  weight_init().std = config.init_std;
  model_ = register_module("model", std::make_shared<Hooked<DecoderStack>>(network_, context_));
  lm_head_ =
      register_module("lm_head", std::make_shared<Hooked<Linear>>(Linear::Options{.in = config.hidden_size,
                                                                                  .out = config.vocab_size,
                                                                                  .tied = config.tie_word_embeddings,
                                                                                  .cut = Linear::Cut::kOutputs,
                                                                                  .ranks = context_.tensor_parallel}));
  if (config.tie_word_embeddings) tie_parameter(*lm_head_, lm_head_->weight, model_->embed_tokens()->weight);
}

ModelOutput DecoderModel::forward(Batch input) {
  for (const auto& [name, column] : input.columns) {
    TORCH_CHECK(column.axis != Axis::kItem, class_name(), " sees no pictures, but the input has ", name,
                ": train a vision-language model, or give text");
  }
  const auto states = model_->forward(input, {});
  ModelOutput output = head_output(context_, states.hidden, *lm_head_, input);
  output.aux = router_terms(states, input.sequence);
  return output;
}

ModelOutput head_output(const BuildContext& context, const at::Tensor& states, Hooked<Linear>& head,
                        const Batch& input) {
  const auto& ranks = *context.tensor_parallel;
  const auto hidden = ranks.enter(states);
  const at::Tensor labels = input.labels(), weights = input.find(kLossWeights);
  if (!labels.defined()) {
    const auto logits = head.forward(hidden);
    return {.logits = ranks.size() == 1 ? logits : gather_from_tensor_parallel_region(logits, ranks.group())};
  }
  auto losses = head.run_as_forward(
      [&](const at::Tensor& x) { return head.token_losses(x, labels, weights, context.logits_at_once); }, hidden);
  return {.token_losses = std::move(losses.of_tokens), .weighted_loss = std::move(losses.weighted)};
}

OtherPaths decoder_megatron_paths(const std::string& stack) {
  OtherPaths paths;
  for (const char* outer : {"text_decoder.", ""}) {
    const std::string inside = outer;
    paths.insert(paths.end(), {{inside + "embedding.word_embeddings", stack + "embed_tokens"},
                               {inside + "embedding", stack + "embed_tokens"},
                               {inside + "rotary_pos_emb", stack + "rotary_emb"},
                               {inside + "decoder.layers", stack + "layers"},
                               {inside + "decoder.final_layernorm", stack + "norm"},
                               {inside + "output_layer", "lm_head"}});
  }
  return paths;
}

std::vector<std::string> DecoderModel::patterns_of_part(const std::string& part) const {
  return megashard::patterns_of_part(network_, "model.layers", part);
}

void DecoderModel::check_sequence_ranks(int64_t ranks) const {
  for_each_part(network_, [&](const PartSpec& part) {
    part.check_sequence_ranks(class_name(), ranks, context_.tensor_parallel->size());
  });
}

void DecoderModel::check_sequence_ring() const {
  if (!is_training()) return;
  for_each_part(network_, [&](const PartSpec& part) { part.check_sequence_ring(class_name()); });
}

void DecoderModel::_init_tp_model() {
  const auto& group = request().tensor_parallel_group;
  if (group == nullptr && context_.tensor_parallel->size() == 1) return;
  context_.tensor_parallel->set_group(group);
  const auto mesh = std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{group}, std::vector<std::string>{"tp"});
  for (const auto& module : modules()) {
    if (auto* cut = dynamic_cast<CutOverRanks*>(module.get())) cut->declare_cut(mesh);
  }
  for (const auto& parameter : parameters()) {
    if (!tensor_parallel_layout(parameter)) set_tensor_parallel(parameter, mesh, Placement::replicate());
  }
}

bool DecoderModel::keeps_fp32(const std::string& name) const {
  constexpr std::string_view kLayers = "model.layers.";
  return name.starts_with(kLayers) && megashard::keeps_fp32(network_, name.substr(kLayers.size()));
}

double DecoderModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  return megashard::training_flops(network_, sequences, sequence_length);
}

}  // namespace megashard
