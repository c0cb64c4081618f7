#include "models/decoder/decoder_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>

#include "framework/diagnostics.h"
#include "framework/modules/tie.h"
#include "framework/training/flops.h"
#include "parallel/sequence_parallel/ulysses.h"
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

DecoderStack::DecoderStack(const DecoderConfig& config)
    : class_name_(config.names.decoder),
      ranks_(config.tensor_parallel),
      dropout_(config.hidden_dropout),
      embedding_scale_(config.embedding_scale),
      window_(config.sliding_window) {
  embed_tokens_ = register_module(
      "embed_tokens",
      std::make_shared<Hooked<Embedding>>(config.vocab_size, config.hidden_size, config.pad_token_id, ranks_));
  if (config.positions == PositionKind::kLearned) {
    embed_positions_ = register_module("embed_positions",
                                       std::make_shared<Hooked<Embedding>>(config.max_positions, config.hidden_size));
  }
  const auto layers = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    layers_.push_back(std::make_shared<Hooked<DecoderLayer>>(config, i));
    layers->push_back(layers_.back());
    slides_.push_back(config.is_sliding(i));
  }
  norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(config, config.hidden_size));
  if (config.positions == PositionKind::kRotary) {
    rotary_emb_ = register_module("rotary_emb", std::make_shared<Hooked<RotaryEmbedding>>(config));
  }
  if (config.sliding_rotary) {
    rotary_emb_local_ =
        register_module("rotary_emb_local", std::make_shared<Hooked<RotaryEmbedding>>(config, *config.sliding_rotary));
  }
}

std::vector<std::shared_ptr<Hooked<SparseMoeBlock>>> DecoderStack::sparse_blocks() const {
  std::vector<std::shared_ptr<Hooked<SparseMoeBlock>>> blocks;
  for (const auto& layer : layers_) {
    if (layer->experts()) blocks.push_back(layer->experts());
  }
  return blocks;
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

RoutedStates DecoderStack::forward(const Batch& input, const VisualInput& visual) {
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
  LayerContext context{.rotary = {}, .token_mask = input.token_mask(), .span = {.sequence = sequence}};
  context.span.documents = Documents::of(input.document_lengths, rows, sequence.is_whole() ? length : sequence.length,
                                         sequence.ring != nullptr, hidden.device());
  if (rotary_emb_) context.rotary = rotate(*rotary_emb_, input, hidden, positions);
  auto sliding = context;
  sliding.span.window = window_;
  if (rotary_emb_local_) sliding.rotary = rotate(*rotary_emb_local_, input, hidden, positions);
  std::vector<at::Tensor> balance, z;  // of the layers with experts
  for (size_t i = 0; i < layers_.size(); ++i) {
    auto states = layers_[i]->forward(hidden, slides_[i] ? sliding : context);
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

DecoderModel::DecoderModel(DecoderConfig config) : config_(std::move(config)) {
  weight_init().std = config_.init_std;
  model_ = register_module("model", std::make_shared<Hooked<DecoderStack>>(config_));
  lm_head_ =
      register_module("lm_head", std::make_shared<Hooked<Linear>>(Linear::Options{.in = config_.hidden_size,
                                                                                  .out = config_.vocab_size,
                                                                                  .tied = config_.tie_word_embeddings,
                                                                                  .cut = Linear::Cut::kOutputs,
                                                                                  .ranks = config_.tensor_parallel}));
  if (config_.tie_word_embeddings) tie_parameter(*lm_head_, lm_head_->weight, model_->embed_tokens()->weight);
}

ModelOutput DecoderModel::forward(Batch input) {
  for (const auto& [name, column] : input.columns) {
    TORCH_CHECK(column.axis != Axis::kItem, class_name(), " sees no pictures, but the input has ", name,
                ": train a vision-language model, or give text");
  }
  const auto states = model_->forward(input, {});
  ModelOutput output = head_output(config_, states.hidden, *lm_head_, input);
  output.aux = router_terms(states, input.sequence);
  return output;
}

namespace {

std::vector<int64_t> layers_with_experts(const DecoderConfig& config, bool with) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < config.num_layers; ++i) {
    if (config.moe.is_sparse(i) == with) layers.push_back(i);
  }
  return layers;
}

}  // namespace

ModelOutput head_output(const DecoderConfig& config, const at::Tensor& states, Hooked<Linear>& head,
                        const Batch& input) {
  const auto& ranks = *config.tensor_parallel;
  const auto hidden = ranks.enter(states);
  const at::Tensor labels = input.labels(), weights = input.find(kLossWeights);
  if (!labels.defined()) {
    const auto logits = head.forward(hidden);
    return {.logits = ranks.size() == 1 ? logits : gather_from_tensor_parallel_region(logits, ranks.group())};
  }
  auto losses = head.run_as_forward(
      [&](const at::Tensor& x) { return head.token_losses(x, labels, weights, config.logits_at_once); }, hidden);
  return {.token_losses = std::move(losses.of_tokens), .weighted_loss = std::move(losses.weighted)};
}

std::vector<std::string> decoder_patterns_of_part(const DecoderConfig& config, const std::string& list,
                                                  const std::string& part) {
  const std::string layer = list + ".{*}", attention = layer + ".self_attn";
  if (part == "layer") return {layer};
  if (part == "core_attn") return {attention + ".core_attention"};
  if (part == "qkv_linear") return {attention + ".q_proj", attention + ".k_proj", attention + ".v_proj"};
  if (part == "attn_proj") return {attention + ".o_proj"};
  if (part == "attn_norm") return {layer + ".input_layernorm"};
  if (part == "mlp_norm")
    return {layer + (config.sandwich_norms ? ".pre_feedforward_layernorm" : ".post_attention_layernorm")};
  if (part != "mlp" && part != "moe") return {};
  const auto layers = layers_with_experts(config, part == "moe");
  if (layers.empty()) return {};
  return {list + ".{" + c10::Join(",", layers) + "}.mlp"};
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
  return decoder_patterns_of_part(config_, "model.layers", part);
}

void DecoderModel::check_sequence_ranks(int64_t ranks) const {
  const int64_t pieces = config_.tensor_parallel->size();
  check_ulysses_heads(class_name(), config_.num_heads / pieces, config_.num_kv_heads / pieces, ranks);
}

void DecoderModel::_init_tp_model() {
  const auto& group = request().tensor_parallel_group;
  if (group == nullptr && config_.tensor_parallel->size() == 1) return;
  config_.tensor_parallel->set_group(group);
  const auto mesh = std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{group}, std::vector<std::string>{"tp"});
  for (const auto& module : modules()) {
    if (auto* linear = dynamic_cast<Linear*>(module.get())) linear->declare_cut(mesh);
    if (auto* embedding = dynamic_cast<Embedding*>(module.get())) embedding->declare_cut(mesh);
  }
  for (const auto& parameter : parameters()) {
    if (!tensor_parallel_layout(parameter)) set_tensor_parallel(parameter, mesh, Placement::replicate());
  }
}

void DecoderModel::check_sequence_ring() const {
  require(!is_training() || config_.attention_dropout == 0,
          c10::str(class_name(), " has an attention dropout of ", config_.attention_dropout,
                   ", and ring attention has none; give --attention-dropout 0 (in config.json attention_dropout), or "
                   "--context-parallel-algo ulysses_cp_algo."));
}

double DecoderModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  return decoder_training_flops(config_, sequences, sequence_length);
}

double decoder_training_flops(const DecoderConfig& config, int64_t sequences, int64_t sequence_length) {
  TransformerShape shape;
  shape.num_layers = static_cast<int64_t>(layers_with_experts(config, false).size());
  shape.hidden_size = config.hidden_size;
  shape.ffn_hidden_size = config.intermediate_size;
  shape.gated_mlp = config.gated_mlp;
  shape.num_heads = config.num_heads;
  shape.num_key_value_heads = config.num_kv_heads;
  shape.head_size = config.head_dim;
  shape.vocab_size = config.vocab_size;
  const double dense = megashard::training_flops(shape, sequences, sequence_length);
  shape.num_layers = config.num_layers - shape.num_layers;                              // the others, of which a token
  shape.ffn_hidden_size = config.moe.intermediate_size * config.moe.experts_per_token;  // meets these
  shape.vocab_size = 0;
  return dense + megashard::training_flops(shape, sequences, sequence_length);
}

}  // namespace megashard
