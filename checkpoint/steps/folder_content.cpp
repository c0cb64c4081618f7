#include "checkpoint/steps/folder_content.h"

#include <filesystem>
#include <set>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/trial_files.h"
#include "checkpoint/steps/checkpoint_directory.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTrackerFile = "latest_checkpointed_iteration.txt";
constexpr const char* kLegacyRanks = "mp_rank_00";
constexpr const char* kWeightsEnds[] = {".safetensors", ".distcp", ".bin", ".pt", ".pth", ".gguf"};

bool is_weights(const std::string& name, const std::set<std::string>& others) {
  const auto path = fs::path(name);
  const bool is_tokens = path.extension() == ".bin" && others.count(path.stem().string() + ".idx");
  for (const char* end : kWeightsEnds) {
    if (name.ends_with(end) && !name.starts_with(".") && !is_tokens) return true;
  }
  return false;
}

/// True if the weights are leftovers of an interrupted save without the file that readers open first.
bool is_half_replaced(const std::string& folder, const std::set<std::string>& names) {
  return is_unfinished(folder + "/model") && names.count("model.safetensors") == 0 &&
         names.count("model.safetensors.index.json") == 0;
}

std::string place_refusal(const std::string& path, const std::string& flag) {
  try {
    try_folder(path);
    return "";
  } catch (const UnwritableError& error) {
    return flag + " " + path + ": " + error.what() + "; give another place";
  }
}

}  // namespace

FolderContent content_of(const std::string& folder) {
  using Kind = FolderContent::Kind;
  if (!is_directory(folder)) return {};
  const auto steps = list_steps(folder);
  if (!steps.empty()) return {Kind::kRun, fs::path(steps[0].folder).filename().string()};
  const auto listing = names_in(folder);
  const std::set<std::string> names(listing.begin(), listing.end());
  if (names.count(kTrackerFile) != 0) return {Kind::kRun, kTrackerFile};
  for (const char* file : {kDcpMetadataFile, kFormatFile, kCommonFile}) {
    if (names.count(file) != 0) return {Kind::kStep, file};
  }
  const bool half_replaced = is_half_replaced(folder, names);
  for (const auto& name : names) {
    if (name.starts_with(kLegacyRanks)) return {Kind::kStep, name};
    if (is_weights(name, names) && !half_replaced) return {Kind::kWeights, name};
  }
  return {};
}

FolderContent misplaced_checkpoint(const std::string& folder) {
  using Kind = FolderContent::Kind;
  const auto content = content_of(folder);
  if (content.kind != Kind::kNothing || !is_directory(folder)) return content;
  for (const auto& name : names_in(folder)) {
    if (name.starts_with(".")) continue;
    const auto below = content_of(folder + "/" + name);
    if (below.kind == Kind::kStep || below.kind == Kind::kRun) return {below.kind, name + "/" + below.name};
  }
  return {};
}

std::string content_refusal(const std::string& folder, const std::string& flag, bool overwrite) {
  const auto content = overwrite ? FolderContent() : content_of(folder);
  const char* what = nullptr;
  switch (content.kind) {
    case FolderContent::Kind::kNothing:
      return "";
    case FolderContent::Kind::kWeights:
      what = "weights";
      break;
    case FolderContent::Kind::kStep:
      what = "a step";
      break;
    case FolderContent::Kind::kRun:
      what = "a run's steps";
      break;
  }
  return flag + " " + folder + " holds " + what + " (" + content.name + "): give a folder of its own, or --overwrite";
}

std::string folder_refusal(const std::string& folder, const std::string& flag, bool overwrite) {
  const auto refusal = content_refusal(folder, flag, overwrite);
  return refusal.empty() ? place_refusal(folder, flag) : refusal;
}

std::string file_refusal(const std::string& path, const std::string& flag, bool overwrite) {
  if (is_directory(path))
    return flag + ": " + path + " is a directory, and " + flag + " takes a file: give its name too";
  const auto folder = fs::absolute(path).lexically_normal().parent_path().string();
  if (!is_directory(folder)) return flag + " " + path + ": there is no directory " + folder;
  if (path_exists(path) && !overwrite) return flag + ": " + path + " exists already: give another name, or --overwrite";
  return place_refusal(folder, flag);
}

}  // namespace megashard
