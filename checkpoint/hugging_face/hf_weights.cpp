#include "checkpoint/hugging_face/hf_weights.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/files/strict_json.h"
#include "checkpoint/hugging_face/missing_weights.h"

namespace megashard {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 256 << 20;

}  // namespace

std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& where) {
  const auto index = parse_strict_json(text, where);
  TORCH_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), where,
              " is no index: it has no weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    TORCH_CHECK(file.is_string() && is_plain_file_name(file.get_ref<const std::string&>()), where, ": tensor \"", name,
                "\" is not in a file of this folder");
    files.emplace(name, file.get<std::string>());
  }
  return files;
}

HfWeights::HfWeights(const std::string& directory) : directory_(directory) {
  TORCH_CHECK(is_directory(directory), "there is no Hugging Face directory ", directory);
  const auto single = directory + "/" + kSingleName;
  const auto index = directory + "/" + kIndexName;
  if (path_exists(index)) {
    read_index(directory, index);
  } else {
    if (!path_exists(single)) TORCH_CHECK(false, why_no_weights(directory));
    add_file(single);
  }
}

void HfWeights::read_index(const std::string& directory, const std::string& index_path) {
  const auto file_names = parse_weight_map(read_small_file(index_path, kMaxIndexBytes), index_path);
  std::set<std::string> files;
  for (const auto& [name, file] : file_names) files.insert(file);
  std::vector<std::string> missing;
  for (const auto& file : files) {
    if (!path_exists(directory + "/" + file)) missing.push_back(file);
  }
  TORCH_CHECK(missing.empty(), index_path, " names ", files.size(), files.size() == 1 ? " file" : " files",
              ", of which ", listed(missing), missing.size() == 1 ? " is" : " are",
              " missing; fetch the directory again, whole");
  for (const auto& file : files) add_file(directory + "/" + file);
  for (const auto& [name, file] : file_names) {
    const auto found = file_of_.find(name);
    const auto path = directory + "/" + file;
    TORCH_CHECK(found != file_of_.end() && files_[found->second]->path() == path, index_path, " says that tensor \"",
                name, "\" is in ", path, ", but it is not there");
  }
}

void HfWeights::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  const auto number = static_cast<int>(files_.size()) - 1;
  for (const auto& info : files_.back()->tensors()) {
    const auto [found, is_new] = file_of_.emplace(info.name, number);
    TORCH_CHECK(is_new, "tensor \"", info.name, "\" is in ", files_[found->second]->path(), " and again in ", path);
    tensors_.push_back(info);
  }
}

int HfWeights::file_of(const std::string& name) const {
  const auto found = file_of_.find(name);
  TORCH_CHECK(found != file_of_.end(), "the weights in ", directory_, " have no tensor \"", name, "\"");
  return found->second;
}

const TensorInfo& HfWeights::info(const std::string& name) const { return files_[file_of(name)]->info(name); }

at::Tensor HfWeights::tensor(const std::string& name) const { return files_[file_of(name)]->tensor(name); }

void HfWeights::forget(const std::string& name) const { files_[file_of(name)]->forget(name); }

void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data, const HfSaveOptions& options) {
  HfFolderWriter folder(directory, plan_hf_files(tensors, options), options);
  try {
    folder.begin();
    for (const auto& file : folder.plan().files) {
      SafetensorsWriter writer(folder.path(file.name), file.tensors);
      for (const auto& info : writer.tensors()) writer.write(data(info));
      writer.finish();
    }
    folder.publish();
  } catch (...) {
    folder.abandon();
    throw;
  }
}

}  // namespace megashard
