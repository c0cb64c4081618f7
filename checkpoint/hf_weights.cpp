#include "checkpoint/hf_weights.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/strict_json.h"

namespace megashard {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr int64_t kMostIndexBytes = 256 << 20;

std::string shard_name(size_t index, size_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return text;
}

std::vector<std::vector<TensorInfo>> split_into_shards(const std::vector<TensorInfo>& tensors,
                                                       int64_t most_shard_bytes) {
  std::vector<std::vector<TensorInfo>> shards(1);
  int64_t shard_bytes = 0;
  for (const auto& info : tensors) {
    const auto bytes = tensor_bytes(info);
    if (!shards.back().empty() && bytes > most_shard_bytes - shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(info);
    shard_bytes += bytes;
  }
  return shards;
}

void remove_earlier_weights(const std::string& directory, const std::set<std::string>& keep) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const auto name = entry.path().filename().string();
    const bool weights = name == kSingleName || name == kIndexName ||
                         (name.starts_with("model-") && name.ends_with(".safetensors"));
    if (weights && keep.count(name) == 0) std::filesystem::remove(entry.path());
  }
}

}  // namespace

HfWeights::HfWeights(const std::string& directory) : directory_(directory) {
  TORCH_CHECK(is_directory(directory), "there is no Hugging Face directory ", directory);
  const auto single = directory + "/" + kSingleName;
  const auto index = directory + "/" + kIndexName;
  if (path_exists(index)) {
    read_index(directory, index);
  } else {
    TORCH_CHECK(path_exists(single), directory, " has neither ", kSingleName, " nor ", kIndexName,
                "; save the model with transformers' save_pretrained first");
    add_file(single);
  }
}

void HfWeights::read_index(const std::string& directory, const std::string& index_path) {
  const auto index = parse_strict_json(read_small_file(index_path, kMostIndexBytes), index_path);
  TORCH_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
              index_path, " is no index: it has no weight_map");
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    TORCH_CHECK(file.is_string() && is_plain_file_name(file.get_ref<const std::string&>()),
                index_path, ": tensor \"", name, "\" is not in a file of this folder");
    files.insert(file.get<std::string>());
  }
  for (const auto& file : files) add_file(directory + "/" + file);
  for (const auto& [name, file] : index["weight_map"].items()) {
    const auto found = file_of_.find(name);
    const auto path = directory + "/" + file.get_ref<const std::string&>();
    TORCH_CHECK(found != file_of_.end() && files_[found->second]->path() == path, index_path,
                " says that tensor \"", name, "\" is in ", path, ", but it is not there");
  }
}

void HfWeights::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  const auto number = static_cast<int>(files_.size()) - 1;
  for (const auto& info : files_.back()->tensors()) {
    const auto [found, is_new] = file_of_.emplace(info.name, number);
    TORCH_CHECK(is_new, "tensor \"", info.name, "\" is in ", files_[found->second]->path(),
                " and again in ", path);
    tensors_.push_back(info);
  }
}

int HfWeights::file_of(const std::string& name) const {
  const auto found = file_of_.find(name);
  TORCH_CHECK(found != file_of_.end(), "the weights in ", directory_, " have no tensor \"", name,
              "\"");
  return found->second;
}

const TensorInfo& HfWeights::info(const std::string& name) const {
  return files_[file_of(name)]->info(name);
}

at::Tensor HfWeights::tensor(const std::string& name) const {
  return files_[file_of(name)]->tensor(name);
}

void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data,
                     int64_t most_shard_bytes) {
  TORCH_CHECK(most_shard_bytes > 0, "the largest size of a safetensors file must be positive, got ",
              most_shard_bytes);
  make_directories(directory);
  const auto shards = split_into_shards(tensors, most_shard_bytes);
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  std::set<std::string> written;
  int64_t total_bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto name = shards.size() == 1 ? kSingleName : shard_name(i, shards.size());
    SafetensorsWriter writer(directory + "/" + name, shards[i]);
    for (const auto& info : writer.tensors()) {
      writer.write(data(info));
      weight_map[info.name] = name;
      total_bytes += tensor_bytes(info);
    }
    writer.finish();
    written.insert(name);
  }
  if (shards.size() > 1) {
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes}}},
                                          {"weight_map", weight_map}};
    write_file_atomically(directory + "/" + kIndexName, index.dump(2) + "\n");
    written.insert(kIndexName);
  }
  remove_earlier_weights(directory, written);
}

}  // namespace megashard
