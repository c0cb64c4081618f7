#include "checkpoint/checkpoint_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <vector>

#include "checkpoint/file_io.h"

namespace megashard {
namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr const char* kRelease = "release";
constexpr const char* kPrefix = "iter_";
// Hidden folders are .NAME and one of these.
constexpr const char* kUnfinished = ".tmp";
constexpr const char* kAside =
    ".old";  // replaced by a new one of its name, which may not be there yet

std::string hidden_name(const std::string& name, const char* suffix) { return "." + name + suffix; }

/// The name of the step whose hidden folder has this name; empty: another thing.
std::string step_of_hidden(const std::string& name, const char* suffix) {
  if (!name.starts_with(".") || !name.ends_with(suffix)) return "";
  const auto step = name.substr(1, name.size() - 1 - std::strlen(suffix));
  return step == kRelease || step.starts_with(kPrefix) ? step : "";
}

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

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error))
    names.push_back(entry.path().filename().string());
  TORCH_CHECK(!error, "cannot list ", directory, ": ", error.message());
  return names;
}

void remove_leftovers(const std::string& directory) {
  for (const auto& name : names_in(directory)) {
    const auto path = directory + "/" + name;
    const auto aside = step_of_hidden(name, kAside);
    if (!aside.empty() && !path_exists(directory + "/" + aside)) {
      rename_durably(path, directory + "/" + aside);
    } else if (!aside.empty() || !step_of_hidden(name, kUnfinished).empty()) {
      remove_directory(path);
    }
  }
}

/// The two folders change places at once; false where the file system cannot do that.
bool swap_folders(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0)
    return true;
  const bool cannot = errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
  TORCH_CHECK(cannot, "cannot exchange ", one, " with ", other, ": ", std::strerror(errno));
  return false;
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

StepWriter::StepWriter(std::string directory, std::string name, int64_t iteration,
                       std::string tracker)
    : directory_(std::move(directory)),
      name_(std::move(name)),
      iteration_(iteration),
      tracker_(std::move(tracker)),
      hidden_(directory_ + "/" + hidden_name(name_, kUnfinished)),
      final_(directory_ + "/" + name_) {}

StepWriter::StepWriter(std::string directory, int64_t iteration)
    : StepWriter(std::move(directory), step_name(iteration), iteration, std::to_string(iteration)) {
}

StepWriter StepWriter::release(std::string directory) {
  return {std::move(directory), kRelease, 0, kRelease};
}

void StepWriter::begin() {
  make_directories(directory_);
  remove_leftovers(directory_);
  make_directories(hidden_);
}

void StepWriter::commit(const std::vector<ManifestFile>& files) {
  write_manifest(hidden_, {iteration_, files});  // syncs the folder too
  const auto damage = step_damage(hidden_, VerifyDepth::kSizes);
  TORCH_CHECK(damage.empty(), damage, ": something else writes to this folder; save again");
  if (path_exists(final_)) {
    replace();
  } else {
    rename_durably(hidden_, final_);
  }
  write_file_atomically(directory_ + "/" + kTracker, tracker_);
}

void StepWriter::replace() {
  if (swap_folders(hidden_, final_)) {
    sync_directory(directory_);
    remove_directory(hidden_);
    return;
  }
  const auto aside = directory_ + "/" + hidden_name(name_, kAside);
  rename_durably(final_, aside);
  rename_durably(hidden_, final_);
  remove_directory(aside);
}

void StepWriter::abandon() noexcept {
  try {
    remove_leftovers(directory_);
  } catch (const std::exception&) {  // the next save tries again, and tells
  }
}

}  // namespace megashard
