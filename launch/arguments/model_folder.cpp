#include "launch/arguments/model_folder.h"

#include <filesystem>
#include <fstream>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

/// Accepts ORGANISATION/MODEL.
bool is_hub_name(const std::string& name) {
  const auto slash = name.find('/');
  const bool plain =
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/") == name.npos;
  return plain && slash != name.npos && slash == name.rfind('/') && slash > 0 && slash + 1 < name.size() &&
         name[0] != '.' && !name.ends_with(".gguf");
}

fs::path hub_cache(const GetVariable& get) {
  if (const auto cache = get("HF_HUB_CACHE")) return *cache;
  if (const auto home = get("HF_HOME")) return fs::path(*home) / "hub";
  return fs::path(get("HOME").value_or("")) / ".cache/huggingface/hub";
}

/// Folder of the snapshot in refs/main that has a config.json; empty if it is not in the cache.
fs::path cached(const std::string& name, const GetVariable& get) {
  auto entry = "models--" + name;
  entry.replace(entry.find('/'), 1, "--");
  const auto model = hub_cache(get) / entry;
  std::string revision;
  std::ifstream(model / "refs" / "main") >> revision;
  const auto snapshot = model / "snapshots" / revision;
  std::error_code error;
  return !revision.empty() && fs::exists(snapshot / "config.json", error) ? snapshot : fs::path();
}

}  // namespace

void require_model_folder(const std::string& flag, const std::string& folder, const GetVariable& get) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  const auto given = flag + " " + folder;
  require(!folder.ends_with(".gguf"),
          given + " is a GGUF file, which is for inference by llama.cpp; give the original model's "
                  "directory, with config.json and safetensors.");
  require(!fs::exists(folder, error),
          given + " is a file; give its folder, " + flag + " " +
              (fs::path(folder).has_parent_path() ? fs::path(folder).parent_path().string() : "."));
  if (!is_hub_name(folder))
    throw UsageError("there is no folder " + folder + "; " + flag +
                     " takes a Hugging Face model directory, with a config.json.");
  const auto snapshot = cached(folder, get);
  require(snapshot.empty(), given +
                                " is a name of the Hugging Face hub, and its files lie in the "
                                "hub's cache: give " +
                                flag + " " + snapshot.string());
  const auto name = folder.substr(folder.find('/') + 1);
  throw UsageError("there is no folder " + folder + "; if it is a name of the Hugging Face hub, run `hf download " +
                   folder + " --local-dir " + name + "` (huggingface-cli of older versions), then give " + flag + " " +
                   name);
}

std::string model_of_pipeline(const std::string& flag, const std::string& folder) {
  const auto has = [&](const char* name) { return fs::exists(fs::path(folder) / name); };
  if (!has("model_index.json") || has("config.json") || !has("transformer")) return folder;
  require(!has("transformer_2"), flag + " " + folder + " is a pipeline of two models, which are trained apart: give " +
                                     folder + "/transformer (of high noise) or " + folder + "/transformer_2");
  return folder + "/transformer";
}

}  // namespace megashard
