#include "checkpoint/inspect/checkpoint_summary.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_assets.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

/// What config.json calls what args call otherwise.
constexpr std::pair<const char*, const char*> kConfigNames[] = {{"num_layers", "num_hidden_layers"},
                                                                {"hidden_size", "hidden_size"},
                                                                {"num_attention_heads", "num_attention_heads"},
                                                                {"num_query_groups", "num_key_value_heads"},
                                                                {"num_experts", "num_experts"},
                                                                {"vocab_size", "vocab_size"}};
constexpr const char* kArgumentNames[] = {
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "num_experts", "seq_length", "lora_r"};

void count_tensor(CheckpointSummary::Part& part, const TensorInfo& info) {
  ++part.tensors;
  part.elements += checked_numel(info.sizes).value_or(0);
  part.bytes += tensor_bytes(info);
  part.dtypes.insert(torch_dtype_name(info.dtype));
}

/// "3" of "rng_state.3.cpu"; empty for other keys.
std::string random_rank_of(const std::string& key) {
  if (!key.starts_with(kRngStateKey)) return "";
  const auto from = std::string(kRngStateKey).size();
  if (from == key.size()) return "0";
  const auto end = key.find_first_of("./", from + 1);
  return key.substr(from + 1, end == key.npos ? end : end - from - 1);
}

/// A tensor's bytes, which tied names share.
std::pair<std::string, int64_t> place_of(const SourceTensor& tensor) {
  if (tensor.chunks.empty()) return {};
  return {tensor.chunks[0].file, tensor.chunks[0].range.offset};
}

void take_arguments(CheckpointSummary& summary, const Dict& args) {
  summary.has_arguments = true;
  const auto number = [&](const char* name) -> const int64_t* {
    const auto* field = args.find(name);
    return field == nullptr ? nullptr : field->get_if<int64_t>();
  };
  if (const auto* ranks = number("world_size")) summary.ranks = *ranks;
  for (const char* name : kArgumentNames) {
    if (const auto* value = number(name)) summary.network[name] = *value;
  }
  for (const char* name : {"vocab_size", "padded_vocab_size"}) {
    if (const auto* value = number(name)) summary.network["vocab_size"] = *value;
  }
  const auto* model = args.find("hf_model");
  const auto* folder = model == nullptr ? nullptr : model->get_if<std::string>();
  if (summary.network.count("num_layers") != 0) summary.family = folder == nullptr ? "gpt" : *folder;
}

void take_config(CheckpointSummary& summary, const nlohmann::ordered_json& config) {
  const auto type = config.value("model_type", nlohmann::ordered_json());
  if (type.is_string()) summary.family = type.get<std::string>();
  const bool nested = config.contains("text_config") && config["text_config"].is_object();
  const auto& text = nested ? config["text_config"] : config;
  for (const auto& [name, theirs] : kConfigNames) {
    const auto value = text.value(theirs, nlohmann::ordered_json());
    if (value.is_number_integer()) summary.network[name] = value.get<int64_t>();
  }
}

}  // namespace

CheckpointSummary summarise(CheckpointSource& source) {
  CheckpointSummary summary;
  std::set<std::pair<std::string, int64_t>> places;
  for (const auto& tensor : source.tensors()) {
    const auto& name = tensor.info.name;
    const auto rank = random_rank_of(name);
    if (!rank.empty()) {
      summary.random_ranks.insert(rank);
    } else if (is_optimizer_key(name)) {
      count_tensor(summary.optimizer, tensor.info);
      if (const auto parts = split_optimizer_state_key(name)) summary.buffers.insert(parts->buffer);
    } else if (tensor.chunks.empty() || places.insert(place_of(tensor)).second) {
      count_tensor(summary.model, tensor.info);
    } else {
      ++summary.tied_names;
    }
  }
  for (const auto& [name, bytes] : source.files())
    summary.data_files += name.ends_with(".distcp") || name.ends_with(".safetensors");
  for (size_t i = 0; i < source.value_keys().size(); ++i) {
    const auto& key = source.value_keys()[i];
    const auto rank = random_rank_of(key);
    if (!rank.empty()) summary.random_ranks.insert(rank);
    if (key != kArgsKey) continue;
    const auto value = source.value(i);
    if (const auto* fields = namespace_fields(value)) take_arguments(summary, *fields);
  }
  if (source.format() == "safetensors" && is_directory(source.path())) {
    if (const auto config = read_hf_config(source.path())) take_config(summary, *config);
  }
  return summary;
}

}  // namespace megashard
