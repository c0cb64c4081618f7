#include "checkpoint/hugging_face/hf_config.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <utility>

#include "checkpoint/hugging_face/hf_files.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// An entry of the folder with this beginning and end of its name; empty if none.
std::string entry_of(const std::string& directory, const std::string& start, const std::string& end) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(start) && name.ends_with(end)) return entry.path().string();
  }
  return "";
}

/// Description of a directory without config.json; empty if it is of no known kind.
std::string what_else(const std::string& directory) {
  if (!entry_of(directory, "adapter_config", ".json").empty())
    return " holds PEFT adapters, not a model: give the model that they belong to "
           "(base_model_name_or_path in adapter_config.json), or merge them first with peft's "
           "merge_and_unload()";
  if (!entry_of(directory, "", ".gguf").empty())
    return " has a GGUF file, which is for inference by llama.cpp: give the original model's "
           "directory, with config.json and safetensors";
  if (!entry_of(directory, "params", ".json").empty() || !entry_of(directory, "consolidated", "").empty())
    return " has a model in Meta's form: give its Hugging Face form, with config.json and "
           "safetensors";
  if (!entry_of(directory, "latest_checkpointed_iteration", ".txt").empty() ||
      !entry_of(directory, ".metadata", "").empty())
    return " is a checkpoint of a run, not a Hugging Face model: give it as --load, or write a "
           "model of it with `megashard convert dcp_to_hf`";
  if (!entry_of(directory, "model_index", ".json").empty())
    return " is a pipeline of diffusers: give the folder of its model, " + directory + "/transformer";
  const auto snapshot = entry_of(directory + "/snapshots", "", "");
  return snapshot.empty() ? "" : " is an entry of the hub's cache: give " + snapshot;
}

}  // namespace

HfConfig HfConfig::of_model(const std::string& directory) {
  if (entry_of(directory, "config.json", "").empty()) {
    const auto what = what_else(directory);
    TORCH_CHECK(what.empty(), directory, what);
  }
  auto config = need_hf_config(directory);
  const auto quantised = config.find("quantization_config");
  TORCH_CHECK(quantised == config.end() || quantised->is_null(), directory,
              "/config.json has a quantization_config: the weights are quantised, which cannot be trained here; give "
              "the model as it was before that");
  return {std::move(config), directory + "/config.json"};
}

}  // namespace megashard
