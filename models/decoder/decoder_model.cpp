#include "models/decoder/decoder_model.h"

#include <utility>

#include "framework/modules/weight_init_mixin.h"
#include "models/lora/lora.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

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
      "lm_head", std::make_shared<Hooked<Head>>(head, context_.tensor_parallel, config.tie_word_embeddings));
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
  const auto hidden = ranks.enter(states);
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
