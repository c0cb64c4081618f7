#include "checkpoint/hugging_face/hf_files.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/files/file_io.h"

namespace megashard {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

std::string file_name(size_t index, size_t count) {
  if (count == 1) return kSingleFile;
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return text;
}

void remove_earlier_weights(const std::string& directory, const std::set<std::string>& keep) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const auto name = entry.path().filename().string();
    const bool weights = name == kSingleFile || name == kIndexFile ||
                         (name.starts_with("model-") && name.ends_with(".safetensors"));
    if (weights && keep.count(name) == 0) std::filesystem::remove(entry.path());
  }
}

}  // namespace

HfFilePlan plan_hf_files(const std::vector<TensorInfo>& tensors, int64_t most_bytes) {
  TORCH_CHECK(most_bytes > 0, "the largest size of a safetensors file must be positive, got ", most_bytes);
  HfFilePlan plan;
  plan.files.emplace_back();
  int64_t file_bytes = 0;
  for (const auto& info : tensors) {
    const auto bytes = tensor_bytes(info);
    if (!plan.files.back().tensors.empty() && bytes > most_bytes - file_bytes) {
      plan.files.emplace_back();
      file_bytes = 0;
    }
    plan.files.back().tensors.push_back(info);
    file_bytes += bytes;
  }
  for (size_t i = 0; i < plan.files.size(); ++i)
    plan.files[i].name = file_name(i, plan.files.size());
  return plan;
}

void finish_hf_files(const std::string& directory, const HfFilePlan& plan) {
  std::set<std::string> written;
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  int64_t total_bytes = 0;
  for (const auto& file : plan.files) {
    written.insert(file.name);
    for (const auto& info : file.tensors) {
      weight_map[info.name] = file.name;
      total_bytes += tensor_bytes(info);
    }
  }
  if (plan.files.size() > 1) {
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes}}},
                                          {"weight_map", weight_map}};
    write_file_atomically(directory + "/" + kIndexFile, index.dump(2) + "\n");
    written.insert(kIndexFile);
  }
  remove_earlier_weights(directory, written);
}

}  // namespace megashard
