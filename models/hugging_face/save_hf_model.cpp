#include "models/hugging_face/save_hf_model.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/steps/folder_content.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/weights/published_tensors.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_value.h"
#include "framework/diagnostics.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/checkpoint_saver.h"
#include "models/families/hf_config_of_network.h"
#include "models/lora/lora.h"
#include "models/lora/save_adapters.h"
#include "models/model_config.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson config_of_network(const DecoderConfig& network) {
  if (auto config = hf_config_of_network(network)) return std::move(*config);
  throw UsageError("--save-hf: transformers' Llama, Qwen2 and Qwen3 do not compute the network of these "
                   "flags; they need --normalization RMSNorm, --swiglu, --position-embedding-type rope, whole "
                   "--rotary-percent, no --apply-layernorm-1p, and with --qk-layernorm or --add-qkv-bias also "
                   "--disable-bias-linear. "
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
  if (!path_exists(hf_model + "/" + kHfWeightsFile) && !path_exists(hf_model + "/" + kHfIndexFile)) return std::nullopt;
  const auto files = open_hf_weights(hf_model);
  std::map<at::ScalarType, int64_t> bytes;
  for (const auto& info : files->tensors()) {
    if (info.dtype == at::kFloat || info.dtype == at::kHalf || info.dtype == at::kBFloat16)
      bytes[info.dtype] += tensor_bytes(info);
  }
  const auto most = std::max_element(bytes.begin(), bytes.end(),
                                     [](const auto& one, const auto& other) { return one.second < other.second; });
  return most == bytes.end() ? std::nullopt : std::optional(most->first);
}

OrderedJson config_of_run(const Arguments& arguments, const HfConfig* file) {
  const auto network = file != nullptr ? network_of(arguments, *file).config : decoder_config(arguments);
  auto config = file != nullptr ? file->json() : config_of_network(network);
  config["tie_word_embeddings"] = network.tie_word_embeddings;
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

void save_hf_model(MegatronModule& model, const OrderedJson& config, const Arguments& arguments,
                   const ProcessGroupPtr& group) {
  const auto& folder = *arguments.save_hf;
  auto tensors = model.keeps_trained_only() ? merged_state_dict(model) : checked_state_dict(model);
  const auto* mixin = dynamic_cast<const FSDP2Mixin*>(&model);
  HfSaveOptions options{.dtype = hf_model_dtype(arguments)};
  auto map = model.weight_map();
  if (arguments.save_hf_stacked_experts) prefer_packed(map);
  tensors = published_tensors(tensors, map);
  for (auto& [name, tensor] : tensors) {
    const bool in_fp32 = mixin != nullptr && mixin->keeps_fp32(name);
    name = map.published_name(name);
    if (in_fp32) options.in_fp32.insert(name);
  }
  options.beside = [&](const std::string& beside) {
    if (arguments.hf_model) copy_hf_assets(*arguments.hf_model, beside);
    write_hf_config(beside, config);
  };
  const auto ranks = make_saving_group(group, "Hugging Face saves");
  save_hf_sharded(folder, tensors, ranks, options);
  if (model.keeps_trained_only()) save_adapters(model, arguments, folder + "/adapter", ranks);
}

}  // namespace megashard
