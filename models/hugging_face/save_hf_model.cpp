#include "models/hugging_face/save_hf_model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/steps/folder_content.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/weights/published_tensors.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_value.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/checkpoint_saver.h"
#include "models/diffusion/latent_families.h"
#include "models/families/model_family.h"
#include "models/lora/lora.h"
#include "models/model_config.h"
#include "models/network/prediction_files.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson rope_scaling(const RotaryConfig& rotary) {
  if (rotary.kind == RotaryConfig::Kind::kDefault) return nullptr;
  OrderedJson scaling;
  scaling["rope_type"] = rotary.kind == RotaryConfig::Kind::kLinear ? "linear" : "llama3";
  scaling["factor"] = rotary.factor;
  if (rotary.kind == RotaryConfig::Kind::kLinear) return scaling;
  scaling["low_freq_factor"] = rotary.low_freq_factor;
  scaling["high_freq_factor"] = rotary.high_freq_factor;
  scaling["original_max_position_embeddings"] = std::llround(rotary.original_max_positions);
  return scaling;
}

OrderedJson common_fields(const ModelFamily& family, const DecoderConfig& network) {
  OrderedJson config;
  config["architectures"] = {family.architecture};
  config["model_type"] = family.model_type;
  config["vocab_size"] = network.vocab_size;
  config["hidden_size"] = network.hidden_size;
  config["intermediate_size"] = network.intermediate_size;
  config["num_hidden_layers"] = network.num_layers;
  config["num_attention_heads"] = network.num_heads;
  config["num_key_value_heads"] = network.num_kv_heads;
  config["head_dim"] = network.head_dim;
  config["max_position_embeddings"] = network.max_positions;
  config["hidden_act"] = "silu";
  config["rms_norm_eps"] = network.norm_eps;
  config["rope_theta"] = network.rotary.theta;
  config["rope_scaling"] = rope_scaling(network.rotary);
  config["attention_dropout"] = network.attention_dropout;
  config["initializer_range"] = network.init_std;
  config["bos_token_id"] = nullptr;  // depends on the text; unknown in training
  config["eos_token_id"] = nullptr;
  return config;
}

/// config.json for a network of Megatron's flags, for the first family whose class supports it; nullopt if none does.
/// Does not include tying and dtype, which the run determines.
std::optional<OrderedJson> config_of_known_family(const DecoderConfig& network) {
  const bool known = network.norm == NormKind::kRmsNorm && !network.zero_centered_norm && network.gated_mlp &&
                     network.positions == PositionKind::kRotary && network.rotary.fraction == 1 && !network.latent &&
                     network.prediction.depth == 0 && !network.attention_gate && !network.attention_sinks &&
                     network.unrotated_layers.empty() && network.sliding_window == 0 && network.moe.latent_size == 0;
  if (!known) return std::nullopt;
  for (const auto& family : model_families()) {
    const auto switches = family.write_switches == nullptr ? std::nullopt : family.write_switches(network);
    if (!switches) continue;
    if ((network.moe.num_experts > 0) != switches->contains("num_experts")) continue;
    auto config = common_fields(family, network);
    config.update(*switches);
    return config;
  }
  return std::nullopt;
}

OrderedJson config_of_network(const DecoderConfig& network) {
  if (auto config = config_of_known_family(network)) return std::move(*config);
  throw UsageError(
      "--save-hf: transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE do not compute the network of these "
      "flags; they need --normalization RMSNorm, --swiglu, --position-embedding-type rope, whole "
      "--rotary-percent, no --apply-layernorm-1p, with --qk-layernorm or --add-qkv-bias also "
      "--disable-bias-linear, and with --num-experts --qk-layernorm, softmax scores without groups, factor "
      "and --moe-router-dtype, and no shared expert, and no --mtp-num-layers, "
      "--attention-output-gate, --softmax-type learnable, --no-rope-freq, --window-size and --moe-latent-size. "
      "Leave --save-hf out, or change the network");
}

/// Writes transformers' new key or its old one, both of which it reads; also into parts of the model that have one.
void write_dtype(OrderedJson& config, const std::string& dtype) {
  for (auto& [name, part] : config.items()) {
    if (!part.is_object()) continue;
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (part.contains(key)) part[key] = dtype;
    }
  }
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = dtype;
}

/// Dtype of most bytes of the floating-point weights; nullopt if there are none that can be trained directly.
std::optional<at::ScalarType> dtype_of_files(const std::string& hf_model) {
  if (!has_hf_weights(hf_model)) return std::nullopt;
  const auto files = open_hf_model(hf_model);
  std::map<at::ScalarType, int64_t> bytes;
  for (const auto& info : files->tensors()) {
    if (info.dtype == at::kFloat || info.dtype == at::kHalf || info.dtype == at::kBFloat16)
      bytes[info.dtype] += tensor_bytes(info);
  }
  const auto most = std::max_element(bytes.begin(), bytes.end(),
                                     [](const auto& one, const auto& other) { return one.second < other.second; });
  return most == bytes.end() ? std::nullopt : std::optional(most->first);
}

/// Names the class of transformers whose head is `score`, with one label, as transformers writes it.
void write_classifier(OrderedJson& config, const ModelFamily& family) {
  const auto architecture = classifier_of(family);
  require(architecture.has_value(), "--save-hf: transformers has no classifier of " + family.model_type +
                                        ", whose head is `score`; leave it out");
  config["architectures"] = {*architecture};
  config["id2label"] = {{"0", "LABEL_0"}};
  config["label2id"] = {{"LABEL_0", 0}};
}

OrderedJson config_of_run(const Arguments& arguments, const HfConfig* file) {
  if (file != nullptr && latent_family_of(file->json()) != nullptr) return file->json();  // has no dtype
  if (file != nullptr && is_of_plugin(arguments, *file)) {
    auto config = file->json();
    write_dtype(config, torch_dtype_name(hf_model_dtype(arguments)));
    return config;
  }
  const auto network = file != nullptr ? network_of(arguments, *file).config : decoder_config(arguments);
  auto config = file != nullptr ? file->json() : config_of_network(network);
  config["tie_word_embeddings"] = network.tie_word_embeddings;
  if (network.prediction.depth > 0)
    config[prediction_depth_key(family_of(*file).weight_files)] = network.prediction.depth;
  if (file != nullptr) {
    if (const auto& family = family_of(*file); family.write_part != nullptr) family.write_part(config);
  }
  if (network.score_head) write_classifier(config, *find_family(config["model_type"]));
  write_dtype(config, torch_dtype_name(hf_model_dtype(arguments)));
  return config;
}

/// Packs what is published one by one.
void prefer_packed(WeightMap& map) {
  for (auto& [tensors, forms] : map.groups) {
    const auto packed = std::ranges::find(forms, "packed", &StoredForm::kind);
    if (forms.front().kind == "separate" && packed != forms.end()) std::iter_swap(forms.begin(), packed);
  }
}

}  // namespace

OrderedJson prepare_hf_model(const Arguments& arguments, const HfConfig* file, const ProcessGroupPtr& group) {
  auto config = config_of_run(arguments, file);
  const auto& folder = *arguments.save_hf;
  const auto real = [](const std::string& path) { return std::filesystem::weakly_canonical(path); };
  if (arguments.hf_model && real(folder) == real(*arguments.hf_model)) {
    throw UsageError("--save-hf " + folder +
                     " is --hf-model's directory, whose weights it would replace; give another");
  }
  const auto refusals = gather_or_throw(
      group, [&] { return rank_in(group) == 0 ? content_refusal(folder, "--save-hf", arguments.overwrite) : ""; });
  if (!refusals[0].empty()) throw UsageError(refusals[0]);
  return config;
}

at::ScalarType hf_model_dtype(const Arguments& arguments) {
  if (arguments.save_hf_dtype) return *parse_dtype(choice_name("save_hf_dtype", *arguments.save_hf_dtype));
  const auto stored = *parse_dtype(arguments.params_dtype);
  if (stored != at::kFloat || !arguments.hf_model || arguments.from_scratch) return stored;
  return dtype_of_files(*arguments.hf_model).value_or(stored);
}

HfWeights whole_weights(MegatronModule& model, const Arguments& arguments, bool packs_experts) {
  auto map = model.weight_map();
  if (packs_experts) prefer_packed(map);
  HfWeights weights;
  weights.tensors =
      published_tensors(model.keeps_trained_only() ? merged_state_dict(model) : checked_state_dict(model), map);
  const auto* mixin = dynamic_cast<const FSDP2Mixin*>(&model);
  for (auto& [name, tensor] : weights.tensors) {
    const bool in_fp32 = mixin != nullptr && mixin->keeps_fp32(name);
    name = map.published_name(name);
    if (in_fp32) weights.files.in_fp32.insert(name);
  }
  if (dynamic_cast<const LatentModel*>(&model) != nullptr) weights.files.stem = kDiffusersStem;
  if (arguments.hf_model) {
    weights.files.beside = [from = *arguments.hf_model](const std::string& beside) { copy_hf_assets(from, beside); };
  }
  return weights;
}

void save_hf_model(MegatronModule& model, const OrderedJson& config, const Arguments& arguments,
                   const ProcessGroupPtr& group) {
  const auto& folder = *arguments.save_hf;
  HfWeights weights = whole_weights(model, arguments, arguments.save_hf_stacked_experts);
  weights.files.dtype = hf_model_dtype(arguments);
  const auto ranks = make_saving_group(group, "Hugging Face saves");
  weights.files.beside = [&config, assets = std::move(weights.files.beside)](const std::string& beside) {
    if (assets) assets(beside);
    write_hf_config(beside, config);
  };
  save_hf_sharded(folder, weights.tensors, ranks, weights.files);
  if (!model.keeps_trained_only()) return;
  const HfWeights adapters = adapter_weights(model, arguments);
  save_hf_sharded(folder + "/adapter", adapters.tensors, ranks, adapters.files);
}

}  // namespace megashard
