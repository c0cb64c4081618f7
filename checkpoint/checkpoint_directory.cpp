#include "checkpoint/checkpoint_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <vector>

#include "checkpoint/file_io.h"

namespace megashard {
namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr const char* kRelease = "release";
constexpr const char* kPrefix = "iter_";

std::string step_name(int64_t iteration) {
  TORCH_CHECK(iteration >= 0, "a checkpoint's iteration cannot be ", iteration);
  auto digits = std::to_string(iteration);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return kPrefix + digits;
}

std::string steps_there(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const auto name = entry.path().filename().string();
    if (entry.is_directory() && (name.starts_with(kPrefix) || name == kRelease))
      names.push_back(name);
  }
  if (names.empty()) return "there are no steps in it";
  std::sort(names.begin(), names.end());
  std::string text = "it has ";
  for (size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return text;
}

CheckpointStep existing(CheckpointStep step, const std::string& directory,
                        const std::string& asked_by) {
  TORCH_CHECK(is_directory(step.folder), asked_by, " asks for ", step.folder, ", which is not there: ",
              steps_there(directory));
  return step;
}

}  // namespace

std::optional<CheckpointStep> latest_step(const std::string& directory) {
  const auto path = directory + "/" + kTracker;
  if (!path_exists(path)) return std::nullopt;
  auto text = read_small_file(path, 1024);
  const auto is_space = [](char c) { return c == '\n' || c == '\r' || c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.back())) text.pop_back();
  if (text == kRelease) return existing({directory + "/" + kRelease, 0, true}, directory, path);
  int64_t iteration = -1;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), iteration);
  const bool whole =
      result.ec == std::errc() && result.ptr == text.data() + text.size() && iteration >= 0;
  TORCH_CHECK(whole, path, " should hold an iteration or the word release; it holds \"", text.substr(0, 40), "\"");
  return existing({directory + "/" + step_name(iteration), iteration, false}, directory, path);
}

CheckpointStep step_at(const std::string& directory, int64_t iteration) {
  return existing({directory + "/" + step_name(iteration), iteration, false}, directory,
                  "--ckpt-step");
}

StepWriter::StepWriter(std::string directory, const std::string& name, std::string tracker)
    : directory_(std::move(directory)),
      hidden_(directory_ + "/." + name + ".tmp"),
      final_(directory_ + "/" + name),
      tracker_(std::move(tracker)) {}

StepWriter::StepWriter(std::string directory, int64_t iteration)
    : StepWriter(std::move(directory), step_name(iteration), std::to_string(iteration)) {}

StepWriter StepWriter::release(std::string directory) {
  return {std::move(directory), kRelease, kRelease};
}

void StepWriter::begin() {
  remove_directory(hidden_);
  make_directories(hidden_);
}

void StepWriter::commit() {
  sync_directory(hidden_);
  if (path_exists(final_)) {  // the same step again: the two change places at once
    const bool swapped =
        ::renameat2(AT_FDCWD, hidden_.c_str(), AT_FDCWD, final_.c_str(), RENAME_EXCHANGE) == 0;
    if (!swapped) {  // a file system without exchange
      const auto old = hidden_ + ".old";
      remove_directory(old);
      rename_durably(final_, old);
      rename_durably(hidden_, final_);
      remove_directory(old);
    }
    sync_directory(directory_);
    remove_directory(hidden_);
  } else {
    rename_durably(hidden_, final_);
  }
  write_file_atomically(directory_ + "/" + kTracker, tracker_);
}

}  // namespace megashard
