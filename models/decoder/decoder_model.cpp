#include "models/decoder/decoder_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "framework/modules/weight_init_mixin.h"
#include "models/layers/key_cache.h"
#include "models/lora/lora.h"
#include "models/network/prediction_files.h"
#include "parallel/copies/on_device.h"
#include "parallel/sequence_parallel/ulysses.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

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
  if (config.layer_inputs.size > 0) {
    auto of_inputs = network.norm;
    of_inputs.width = config.layer_inputs.size;
    layer_inputs_.emplace(*this, config, std::move(of_inputs));
  }
  if (!network.prediction_layers.empty()) {
    const auto list = register_module(kPredictionLayers, std::make_shared<torch::nn::ModuleListImpl>());
    for (const auto& layer : network.prediction_layers) {
      prediction_layers_.push_back(std::make_shared<Hooked<PredictionLayer>>(network, layer, context));
      list->push_back(prediction_layers_.back());
    }
  }
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

Pass DecoderStack::pass_of(const Batch& input, const at::Tensor& hidden, const at::Tensor& positions) {
  const at::Tensor& tokens = input.tokens();
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
  return pass;
}

StackOutput DecoderStack::forward(const Batch& input, const InjectedEmbeddings& injected) {
  const at::Tensor& tokens = input.tokens();
  TORCH_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong,
              "tokens must be int64 of sizes [batch, length], got ", tokens.scalar_type(), " ", tokens.sizes());
  auto positions = input.position_ids();
  if (!positions.defined() && !input.sequence.is_whole()) {
    positions = input.sequence.rows_of(at::arange(input.sequence.length, tokens.options()).unsqueeze(0), 1);
  }
  auto hidden = embed(tokens, positions, injected);
  auto pass = pass_of(input, hidden, positions);
  pass.span.key_ends = injected.key_ends;
  pass.cache = cache_;
  if (cache_) cache_->begin(tokens.size(1), positions);
  if (layer_inputs_) pass.layer_inputs = layer_inputs_->forward(tokens, hidden);
  std::vector<at::Tensor> balance, z;  // layers with experts
  const auto take = [&](LayerOutput output) {
    if (output.balance.defined()) balance.push_back(std::move(output.balance));
    if (output.z.defined()) z.push_back(std::move(output.z));
    if (output.given.keys.defined()) pass.shared_keys[output.given.place] = std::move(output.given);
    return std::move(output.hidden);
  };
  for (size_t i = 0; i < layers_.size(); ++i) {
    hidden = take(layers_[i]->forward(hidden, pass));
    if (i >= injected.deepstack.size()) continue;
    hidden = hidden.flatten(0, 1)
                 .index_add(0, injected.token_indices.narrow(0, 0, injected.deepstack[i].size(0)),
                            injected.deepstack[i].to(hidden.scalar_type()))
                 .view(hidden.sizes());
  }
  hidden = norm_->forward(hidden);
  std::vector<at::Tensor> predicted;
  if (const auto later = input.find(kLaterTokens); later.defined()) {
    for (size_t k = 0; k < prediction_layers_.size(); ++k) {
      const auto embedded = embed(later[static_cast<int64_t>(k)], positions, {});
      predicted.push_back(take(prediction_layers_[k]->forward(k == 0 ? hidden : predicted.back(), embedded, pass)));
    }
  }
  return {
      .layers = {hidden, balance.empty() ? at::Tensor() : at::stack(balance), z.empty() ? at::Tensor() : at::stack(z)},
      .predicted = std::move(predicted)};
}

EncodedStack::EncodedStack(const Network& network, const BuildContext& context)
    : class_name_(network.encoder->owner_class()), encoder_(network.encoder->build()) {
  for (const auto& [name, module] : encoder_->modules()) register_module(name, module);
  language_model_ = register_module("language_model", std::make_shared<Hooked<DecoderStack>>(network, context));
}

StackOutput EncodedStack::forward(const Batch& input) {
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
  if (config.score_head) {
    score_ = register_module("score", std::make_shared<Hooked<ScoreHead>>(config.hidden_size));
    return;
  }
  const Linear::Options head{.in = config.hidden_size, .out = config.vocab_size};
  lm_head_ = register_module(
      "lm_head",
      std::make_shared<Hooked<Head>>(head, context_.tensor_parallel, config.tie_word_embeddings, config.logit_softcap));
  if (config.tie_word_embeddings) tie_parameter(*lm_head_, lm_head_->weight, text_->embed_tokens()->weight);
}

void DecoderModel::prepare(Batch& input) const {
  if (encoded_) encoded_->encoder()->prepare(input);
  const int64_t depth = network_.config.prediction.depth;
  if (depth > 0 && is_training() && input.labels().defined()) add_later_tokens(input, depth);
}

ModelOutput DecoderModel::forward(Batch input) {
  for (const auto& [name, column] : input.columns) {
    TORCH_CHECK(encoded_ || column.axis != Axis::kItem || !column.is_input, class_name(),
                " sees no pictures, but the input has ", name, ": train a vision-language model, or give text");
  }
  const auto states = encoded_ ? encoded_->forward(input) : text_->forward(input, {});
  const auto temperatures = input.find(kLogitTemperatures);
  auto hidden = states.layers.hidden;
  if (temperatures.defined()) {  // 0 behind a row's tokens
    const auto factors = at::where(temperatures > 0, temperatures.reciprocal(), at::ones_like(temperatures));
    hidden = (hidden * factors.unsqueeze(-1)).to(hidden.scalar_type());
  }
  auto output = head_output(hidden, input);
  output.aux = router_terms(states.layers, input.sequence);
  std::ranges::move(prediction_terms(states.predicted, input), std::back_inserter(output.aux));
  return output;
}

at::Tensor DecoderModel::head_input(const at::Tensor& states) const {
  const double scale = network_.config.logit_scale;
  return context_.tensor_parallel->enter(scale == 1 ? states : states * scale);
}

TokenLosses DecoderModel::token_losses(const at::Tensor& states, const at::Tensor& labels, const at::Tensor& weights) {
  return lm_head_->run_as_forward(
      [&](const at::Tensor& x) { return lm_head_->token_losses(x, labels, weights, context_.logits_at_once); },
      head_input(states));
}

std::vector<AuxTerm> DecoderModel::prediction_terms(const std::vector<at::Tensor>& predicted, const Batch& input) {
  std::vector<AuxTerm> terms;
  for (size_t i = 0; i < predicted.size(); ++i) {
    const auto k = static_cast<int64_t>(i);
    const auto count = input.at(kLaterCounts).select(1, k).sum();
    const auto weights = input.at(kLaterMask)[k] / count.clamp_min(1);
    const auto losses = token_losses(predicted[i], input.at(kLaterLabels)[k], weights);
    const auto own = losses.weighted.defined() ? losses.weighted : (losses.of_tokens * weights).sum();
    const auto mean = sum_over_sequence(own, input.sequence);
    const double coefficient = network_.config.prediction.loss_scale / static_cast<double>(predicted.size());
    terms.push_back({.name = "mtp_" + std::to_string(k + 1) + " loss",
                     .value = mean * coefficient,
                     .metric = mean.detach().to(at::kDouble),
                     .tokens = count});
  }
  return terms;
}

ModelOutput DecoderModel::head_output(const at::Tensor& states, const Batch& input) {
  if (score_) return {.values = score_->forward(states)};
  if (const auto labels = input.labels();
      labels.defined() && (input.asked.entropies || input.asked.teacher_log_probs)) {
    const HeadQuestion question{labels, input.asked.entropies,
                                input.asked.teacher_log_probs ? input.at(kTeacherTokens) : at::Tensor()};
    auto found = lm_head_->run_as_forward(
        [&](const at::Tensor& x) { return lm_head_->outputs(x, question, context_.logits_at_once); },
        head_input(states));
    return {.token_losses = std::move(found.losses),
            .entropies = std::move(found.entropies),
            .teacher_log_probs = std::move(found.log_probs)};
  }
  if (const auto labels = input.labels(); labels.defined()) {
    auto losses = token_losses(states, labels, input.find(kLossWeights));
    return {.token_losses = std::move(losses.of_tokens), .weighted_loss = std::move(losses.weighted)};
  }
  const auto& ranks = *context_.tensor_parallel;
  const auto logits = lm_head_->forward(head_input(states));
  return {.logits = ranks.size() == 1 ? logits : gather_from_tensor_parallel_region(logits, ranks.group())};
}

std::string DecoderModel::text_path() const { return encoded_ ? "model.language_model." : "model."; }

std::vector<EncoderTower> DecoderModel::towers() const {
  return encoded_ ? network_.encoder->towers() : std::vector<EncoderTower>();
}

std::vector<std::string> DecoderModel::encoder_layers() const {
  std::vector<std::string> patterns;
  for (const auto& tower : towers()) {
    if (!tower.layers.empty()) patterns.push_back("model." + tower.name + "." + tower.layers);
  }
  return patterns;
}

OtherPaths DecoderModel::other_paths() const {
  OtherPaths paths;
  const auto text = text_path();
  for (const char* outer : {"text_decoder.", ""}) {
    const std::string inside = outer;
    paths.insert(paths.end(), {{inside + "embedding.word_embeddings", text + "embed_tokens"},
                               {inside + "embedding", text + "embed_tokens"},
                               {inside + "rotary_pos_emb", text + "rotary_emb"},
                               {inside + "decoder.layers", text + "layers"},
                               {inside + "mtp.layers", text + kPredictionLayers},
                               {inside + "decoder.final_layernorm", text + "norm"},
                               {inside + "output_layer", "lm_head"}});
  }
  for (const auto& tower : towers()) paths.emplace_back(tower.megatron_name, "model." + tower.name);
  const auto path_of = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  for (const auto& [model, files] : weight_files_.renamings) {
    if (model.ends_with('.') && files.ends_with('.')) paths.emplace_back(path_of(files), path_of(model));
  }
  return paths;
}

std::vector<std::string> DecoderModel::default_modules_to_wrap() const {
  auto patterns = encoder_layers();
  std::ranges::copy(patterns_of_part("layer"), std::back_inserter(patterns));
  return patterns;
}

std::vector<std::string> DecoderModel::patterns_of_part(const std::string& part) const {
  if (part == "tower_layer") return encoder_layers();
  return megashard::patterns_of_part(network_, text_path(), part);
}

std::optional<bool> DecoderModel::cast_forward_inputs(const NamedModule& each) const {
  for (const auto& tower : towers()) {
    if (!tower.casts_inputs && each.path.starts_with("model." + tower.name + ".")) return false;
  }
  return std::nullopt;
}

bool DecoderModel::keeps_fp32(const std::string& name) const {
  return megashard::keeps_fp32(network_, text_path(), name);
}

WeightMap DecoderModel::weight_map() const {
  auto map = megashard::weight_map(network_, text_path(), weight_files_);
  if (encoded_) std::ranges::move(network_.encoder->weight_forms("model."), std::back_inserter(map.groups));
  add_adapter_forms(*this, map);
  map.left_out = weight_files_.others;
  return map;
}

bool DecoderModel::is_of_prediction_layer(const std::string& stored) const {
  return megashard::is_of_prediction_layer(network_.config, text_path(), weight_files_, stored);
}

bool DecoderModel::is_of_taken_keys(const std::string& stored) const {
  const auto& config = network_.config;
  for (int64_t layer = config.num_layers - config.shared_kv_layers; layer < config.num_layers; ++layer) {
    const auto attention = text_path() + "layers." + std::to_string(layer) + ".self_attn.";
    for (const char* module : {"k_proj.", "v_proj.", "k_norm."}) {
      if (stored.starts_with(attention + module)) return true;
    }
  }
  return false;
}

std::vector<int64_t> DecoderModel::qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const {
  return encoded_ ? network_.encoder->qkv_split_shapes(name, sizes) : std::vector<int64_t>();
}

std::string DecoderModel::why_no_keys() const {
  if (network_.encoder) return "it takes pictures";
  bool continues = true;
  for_each_part(network_, [&](const PartSpec& part) { continues = continues && part.continues_from_cache(); });
  if (!continues) return "some of its layers pass on more than keys and values";
  return turns_by_length() ? "its positions turn by the sequence's length" : "";
}

bool DecoderModel::turns_by_length() const {
  const auto by_length = [](const RotaryConfig& rotary) { return rotary.depends_on_length(); };
  return !network_.encoder && std::ranges::any_of(network_.rotaries, by_length);
}

void DecoderModel::keep_keys(int64_t capacity) {
  TORCH_INTERNAL_ASSERT(why_no_keys().empty());
  text_->set_cache(std::make_shared<KeyCache>(capacity));
}

void DecoderModel::drop_keys() { text_->set_cache(nullptr); }

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
