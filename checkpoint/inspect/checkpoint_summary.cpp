#include "checkpoint/inspect/checkpoint_summary.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

/// Names in config.json for the names in args.
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

std::vector<std::pair<std::string, int64_t>> files_of(const CheckpointReader& reader) {
  std::vector<std::pair<std::string, int64_t>> files;
  const bool is_folder = is_directory(reader.path());
  for (const auto& name : reader.file_names()) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(is_folder ? reader.path() + "/" + name : reader.path(), error);
    files.emplace_back(name, error ? int64_t{-1} : static_cast<int64_t>(bytes));
  }
  return files;
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
  const auto* grouped = args.find("group_query_attention");  // if false, the number of groups is meaningless
  if (grouped != nullptr && grouped->get_if<bool>() != nullptr && !*grouped->get_if<bool>())
    summary.network.erase("num_query_groups");
  for (const char* name : {"vocab_size", "padded_vocab_size"}) {
    if (const auto* value = number(name)) summary.network["vocab_size"] = *value;
  }
  const auto text = [&](const char* name) {
    const auto* value = args.find(name);
    return value == nullptr ? nullptr : value->get_if<std::string>();
  };
  if (summary.network.count("num_layers") == 0) return;
  summary.family = "gpt";
  for (const char* name : {"model", "hf_model"}) {
    if (const auto* named = text(name)) summary.family = *named;
  }
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

CheckpointSummary summarise(CheckpointReader& reader) {
  CheckpointSummary summary{.files = files_of(reader)};
  const auto step = step_named(std::filesystem::path(reader.path()).filename().string(), reader.path());
  if (step && !step->is_release) summary.iteration = step->iteration;
  std::set<std::pair<std::string, int64_t>> places;  // locations of data, which tied names share
  for (const auto& info : reader.tensors()) {
    const auto& name = info.name;
    const auto rank = random_rank_of(name);
    if (!rank.empty()) {
      summary.random_ranks.insert(rank);
    } else if (is_optimizer_key(name)) {
      count_tensor(summary.optimizer, info);
      if (const auto parts = split_optimizer_state_key(name)) summary.buffers.insert(parts->buffer);
    } else if (const auto chunks = reader.chunks(name);
               chunks.empty() || places.emplace(chunks[0].file, chunks[0].range.offset).second) {
      count_tensor(summary.model, info);
    } else {
      ++summary.tied_names;
    }
  }
  for (const auto& [name, bytes] : summary.files)
    summary.data_files += name.ends_with(".distcp") || name.ends_with(".safetensors");
  for (const auto& [key, path] : reader.value_keys()) {
    const auto rank = random_rank_of(key);
    if (!rank.empty()) summary.random_ranks.insert(rank);
    if (key != kArgsKey) continue;
    const auto value = reader.read_value(key);
    if (const auto* fields = namespace_fields(value)) take_arguments(summary, *fields);
  }
  if (reader.format() == "safetensors" && is_directory(reader.path())) {
    if (const auto config = read_hf_config(reader.path())) take_config(summary, *config);
  }
  return summary;
}

CheckedBytes verify_checkpoint(CheckpointReader& reader, const FaultSink& fault) {
  const auto& path = reader.path();
  const bool is_step = reader.format() == "torch_dcp" || reader.format() == "torch_dist";
  if (is_step && has_manifest(path)) {
    try {
      const auto parts = read_manifest(path).files.size();
      for (size_t part = 0; part < parts; ++part) {  // file by file, so that every damaged one is reported
        const auto damage = step_damage(path, VerifyDepth::kBytes, part, parts);
        if (!damage.empty()) fault(damage);
      }
    } catch (const c10::Error& error) {
      fault(std::string(error.what_without_backtrace()) + " (manifest.json)");
    }
  }
  return reader.verify(fault);
}

}  // namespace megashard
