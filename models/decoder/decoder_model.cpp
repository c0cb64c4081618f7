#include "models/decoder/decoder_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/nn/modules/container/modulelist.h>

#include <charconv>
#include <utility>

#include "framework/modules/weight_init_mixin.h"
#include "models/lora/lora.h"
#include "parallel/copies/on_device.h"
#include "parallel/sequence_parallel/ulysses.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"

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
    : class_name_(spec.class_name), dropout_(spec.dropout), scale_(spec.scale) {
  for (const auto& branch : spec.branches) {
    branches_.push_back({.part = branch.part->build(context), .before = {}, .after = {}, .parallel = branch.parallel});
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

at::Tensor DecoderLayer::as_added(at::Tensor branch) const {
  if (is_training() && dropout_ > 0) branch = at::dropout(branch, dropout_, /*train=*/true);
  return scale_ == 1 ? branch : branch * scale_;
}

LayerOutput DecoderLayer::forward(const at::Tensor& hidden, const Pass& pass) {
  LayerOutput output{.hidden = hidden};
  at::Tensor branch, normed;  // output of the last part, not yet added, and its input
  for (const auto& each : branches_) {
    if (each.parallel) {
      output.hidden = output.hidden + branch;
    } else if (branch.defined()) {
      auto both = normed_sum(each.before, output.hidden, branch);
      output.hidden = std::move(both.sum);
      normed = std::move(both.normed);
    } else {
      normed = each.before ? each.before->forward(output.hidden) : output.hidden;
    }
    auto result = each.part->run(normed, pass);
    const bool shares = &each != &branches_.back() && (&each + 1)->parallel;
    if (!shares) normed.reset();
    if (result.balance.defined()) output.balance = std::move(result.balance);
    if (result.z.defined()) output.z = std::move(result.z);
    branch = as_added(each.after ? each.after->forward(result.hidden) : result.hidden);
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
      embedding_scale_(network.config.embedding_scale),
      attention_chunk_(network.config.attention_chunk),
      temperature_(network.config.temperature) {
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
  if (const int64_t chunk = attention_chunk_; chunk > 0) {
    const int64_t whole = sequence.is_whole() ? length : sequence.length;
    pass.chunks = Documents::of(chunked_lengths(input.document_lengths, rows, whole, chunk), rows, whole,
                                sequence.ring != nullptr, hidden.device());
  }
  if (temperature_) {
    pass.query_factors = query_factors(
        *temperature_, positions.defined() ? on_device(positions, hidden.device())
                                           : at::arange(length, tokens.options().device(hidden.device())));
    if (temperature_->rounded) pass.query_factors = pass.query_factors.to(hidden.scalar_type());
  }
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

DecoderModel::DecoderModel(Network network, BuildContext context, WeightFiles weight_files)
    : network_(std::move(network)), context_(std::move(context)), weight_files_(std::move(weight_files)) {
  const auto& config = network_.config;
  weight_init().std = config.init_std;
  if (network_.encoder) {
    encoded_ = register_module("model", std::make_shared<Hooked<EncodedStack>>(network_, context_));
    text_ = encoded_->language_model();
  } else {
    text_ = register_module("model", std::make_shared<Hooked<DecoderStack>>(network_, context_));
  }
  const Linear::Options head{.in = config.hidden_size, .out = config.vocab_size};
  lm_head_ = register_module(
      "lm_head",
      std::make_shared<Hooked<Head>>(head, context_.tensor_parallel, config.tie_word_embeddings, config.logit_softcap));
  if (config.tie_word_embeddings) tie_parameter(*lm_head_, lm_head_->weight, text_->embed_tokens()->weight);
}

void DecoderModel::prepare(Batch& input) const {
  if (encoded_) encoded_->encoder()->prepare(input);
}

ModelOutput DecoderModel::forward(Batch input) {
  for (const auto& [name, column] : input.columns) {
    TORCH_CHECK(encoded_ || column.axis != Axis::kItem, class_name(), " sees no pictures, but the input has ", name,
                ": train a vision-language model, or give text");
  }
  const auto states = encoded_ ? encoded_->forward(input) : text_->forward(input, {});
  auto output = head_output(states.hidden, input);
  output.aux = router_terms(states, input.sequence);
  return output;
}

ModelOutput DecoderModel::head_output(const at::Tensor& states, const Batch& input) {
  const auto& ranks = *context_.tensor_parallel;
  const double scale = network_.config.logit_scale;
  const auto hidden = ranks.enter(scale == 1 ? states : states * scale);
  const at::Tensor labels = input.labels(), weights = input.find(kLossWeights);
  if (!labels.defined()) {
    const auto logits = lm_head_->forward(hidden);
    return {.logits = ranks.size() == 1 ? logits : gather_from_tensor_parallel_region(logits, ranks.group())};
  }
  auto losses = lm_head_->run_as_forward(
      [&](const at::Tensor& x) { return lm_head_->token_losses(x, labels, weights, context_.logits_at_once); }, hidden);
  return {.token_losses = std::move(losses.of_tokens), .weighted_loss = std::move(losses.weighted)};
}

std::string DecoderModel::text_path() const { return encoded_ ? "model.language_model." : "model."; }
std::string DecoderModel::encoder_path() const { return "model." + network_.encoder->name() + "."; }
std::string DecoderModel::encoder_layers() const {
  const auto layers = encoded_ ? network_.encoder->layers() : "";
  return layers.empty() ? layers : encoder_path() + layers;
}

OtherPaths DecoderModel::megatron_paths() const {
  OtherPaths paths;
  const auto text = text_path();
  for (const char* outer : {"text_decoder.", ""}) {
    const std::string inside = outer;
    paths.insert(paths.end(), {{inside + "embedding.word_embeddings", text + "embed_tokens"},
                               {inside + "embedding", text + "embed_tokens"},
                               {inside + "rotary_pos_emb", text + "rotary_emb"},
                               {inside + "decoder.layers", text + "layers"},
                               {inside + "decoder.final_layernorm", text + "norm"},
                               {inside + "output_layer", "lm_head"}});
  }
  if (encoded_) paths.emplace_back(network_.encoder->megatron_name(), "model." + network_.encoder->name());
  return paths;
}

std::vector<std::string> DecoderModel::default_modules_to_wrap() const {
  std::vector<std::string> patterns{text_path() + "layers.{*}"};
  if (const auto layers = encoder_layers(); !layers.empty()) patterns.insert(patterns.begin(), layers);
  return patterns;
}

std::vector<std::string> DecoderModel::patterns_of_part(const std::string& part) const {
  if (part == "tower_layer") {
    const auto layers = encoder_layers();
    return layers.empty() ? std::vector<std::string>() : std::vector{layers};
  }
  return megashard::patterns_of_part(network_, text_path() + "layers", part);
}

std::optional<bool> DecoderModel::cast_forward_inputs(const NamedModule& each) const {
  const bool keeps = encoded_ && !network_.encoder->casts_inputs() && each.path.starts_with(encoder_path());
  return keeps ? std::optional<bool>(false) : std::nullopt;
}

bool DecoderModel::keeps_fp32(const std::string& name) const {
  const auto layers = text_path() + "layers.";
  return name.starts_with(layers) && megashard::keeps_fp32(network_, name.substr(layers.size()));
}

WeightMap DecoderModel::weight_map() const {
  auto map = megashard::weight_map(network_, text_path() + "layers.", weight_files_);
  add_adapter_forms(*this, map);
  return map;
}

bool DecoderModel::is_of_prediction_layer(const std::string& stored) const {
  using enum WeightFiles::PredictionLayers;
  if (weight_files_.prediction_layers == kMtp) return stored.starts_with("mtp.");
  const auto layers = text_path() + "layers.";
  if (weight_files_.prediction_layers != kBehindLast || !stored.starts_with(layers)) return false;
  int64_t layer = -1;
  std::from_chars(stored.data() + layers.size(), stored.data() + stored.size(), layer);
  return layer >= network_.config.num_layers;
}

std::vector<int64_t> DecoderModel::qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const {
  return encoded_ ? network_.encoder->qkv_split_shapes(name, sizes) : std::vector<int64_t>();
}

void DecoderModel::check_sequence_ranks(int64_t ranks) const {
  for_each_part(network_, [&](const PartSpec& part) {
    part.check_sequence_ranks(class_name(), ranks, context_.tensor_parallel->size());
  });
}

void DecoderModel::check_sequence_ring() const {
  if (encoded_) MultiModalModule::check_sequence_ring();
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
    if (tensor_parallel_layouts(parameter).empty()) set_tensor_parallel(parameter, mesh, Placement::replicate());
  }
}

double DecoderModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  return megashard::training_flops(network_, sequences, sequence_length);
}

}  // namespace megashard
