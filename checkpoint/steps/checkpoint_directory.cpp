#include "checkpoint/steps/checkpoint_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/replace_folder.h"
#include "checkpoint/files/unreadable_error.h"

namespace megashard {
namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr const char* kRelease = "release";
constexpr int64_t kMostTrackerBytes = 1024;
constexpr const char* kPrefix = "iter_";
// Hidden folders are .NAME and one of these.
constexpr const char* kUnfinished = ".tmp";
constexpr const char* kAside =
    ".old";  // replaced by a new one of its name, which may not be there yet
constexpr const char* kRemoved = ".removed";

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

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) throw_read_failure("cannot list " + directory + ": " + error.message(), error.value());
  return names;
}

std::string steps_there(const std::string& directory) {
  std::string text;
  for (const auto& step : list_steps(directory)) {
    text =
        std::filesystem::path(step.folder).filename().string() + (text.empty() ? "" : ", ") + text;
  }
  return text.empty() ? "there are no steps in it" : "it has " + text;
}

bool is_newer(const CheckpointStep& one, const CheckpointStep& other) {
  return one.is_release != other.is_release ? other.is_release : one.iteration > other.iteration;
}

/// The step, or what is left of it while a new one takes its place.
std::optional<CheckpointStep> find_in(const std::string& directory, const CheckpointStep& step) {
  for (const auto& there : list_steps(directory)) {
    if (there.is_release == step.is_release && there.iteration == step.iteration) return there;
  }
  return std::nullopt;
}

CheckpointStep existing(const CheckpointStep& step, const std::string& directory,
                        const std::string& asked_by) {
  const auto found = is_directory(directory) ? find_in(directory, step) : std::nullopt;
  TORCH_CHECK(found, asked_by, " asks for ", step.folder, ", which is not there: ",
              is_directory(directory) ? steps_there(directory) : "nor is its parent");
  return *found;
}

/// False when somebody else has it. Where the file system has no such locks, they keep nobody out.
bool take_lock(int descriptor) {
  return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

bool is_being_written(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool is_free = take_lock(descriptor);
  ::close(descriptor);
  return !is_free;
}

/// The folder's lock, until the last of the pointers is gone or this process ends.
std::shared_ptr<void> lock_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, "cannot open the folder ", folder, ": ", std::strerror(errno));
  std::shared_ptr<void> lock(new int(descriptor), [](int* held) {
    ::close(*held);
    delete held;
  });
  TORCH_CHECK(take_lock(descriptor), folder,
              " is being written by another process: two runs save to one directory");
  return lock;
}

/// Of saves that were cut short. What another process is writing is none.
void remove_leftovers(const std::string& directory) {
  for (const auto& name : names_in(directory)) {
    const auto path = directory + "/" + name;
    const auto aside = step_of_hidden(name, kAside);
    if (!aside.empty() && !path_exists(directory + "/" + aside)) {
      rename_durably(path, directory + "/" + aside);
    } else if (!aside.empty() || !step_of_hidden(name, kRemoved).empty()) {
      remove_directory(path);
    } else if (!step_of_hidden(name, kUnfinished).empty() && !is_being_written(path)) {
      remove_directory(path);
    }
  }
}

}  // namespace

std::optional<CheckpointStep> step_named(const std::string& name, const std::string& folder) {
  if (name == kRelease) return CheckpointStep{folder, 0, true, {}};
  const std::string_view prefix = kPrefix;
  if (!name.starts_with(prefix)) return std::nullopt;
  CheckpointStep step{folder, -1, false, {}};
  const auto* end = name.data() + name.size();
  const auto result = std::from_chars(name.data() + prefix.size(), end, step.iteration);
  const bool whole = result.ec == std::errc() && result.ptr == end && step.iteration >= 0;
  return whole ? std::optional(step) : std::nullopt;
}

bool has_tracker(const std::string& directory) { return path_exists(directory + "/" + kTracker); }

std::optional<CheckpointStep> read_tracker(const std::string& directory) {
  const auto path = directory + "/" + kTracker;
  if (!path_exists(path)) return std::nullopt;
  return parse_tracker(read_small_file(path, kMostTrackerBytes), directory);
}

CheckpointStep parse_tracker(std::string_view text, const std::string& directory) {
  text = text.substr(0, text.find_last_not_of("\n\r \t") + 1);
  if (text == kRelease) return CheckpointStep{directory + "/" + kRelease, 0, true, {}};
  int64_t iteration = -1;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), iteration);
  const bool whole =
      result.ec == std::errc() && result.ptr == text.data() + text.size() && iteration >= 0;
  TORCH_CHECK(whole, directory, "/", kTracker, " should hold an iteration or the word release; it holds \"", text.substr(0, 40), "\"");
  return CheckpointStep{directory + "/" + step_name(iteration), iteration, false, {}};
}

std::optional<CheckpointStep> latest_step(const std::string& directory) {
  const auto named = read_tracker(directory);
  if (!named) return std::nullopt;
  return existing(*named, directory, directory + "/" + kTracker);
}

std::vector<CheckpointStep> list_steps(const std::string& directory) {
  std::vector<CheckpointStep> steps;
  for (const auto& name : names_in(directory)) {
    const auto path = directory + "/" + name;
    const auto aside = step_of_hidden(name, kAside);
    const bool replaced = !aside.empty() && path_exists(directory + "/" + aside);
    const auto step = step_named(aside.empty() ? name : aside, path);
    if (step && !replaced && is_directory(path)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), is_newer);
  return steps;
}

CheckpointStep step_at(const std::string& directory, int64_t iteration) {
  return existing({directory + "/" + step_name(iteration), iteration, false, {}}, directory,
                  "--ckpt-step");
}

void remove_step(const std::string& directory, const CheckpointStep& step) {
  const auto hidden = directory + "/" +
                      hidden_name(std::filesystem::path(step.folder).filename().string(), kRemoved);
  remove_directory(hidden);
  rename_durably(step.folder, hidden);
  remove_directory(hidden);
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
  begin_beside_others();
}

void StepWriter::begin_beside_others() {
  make_directories(hidden_);
  writing_ = lock_folder(hidden_);
  for (const auto& left : names_in(hidden_)) remove_directory(hidden_ + "/" + left);
}

void StepWriter::finish_folder(const std::vector<ManifestFile>& files, const RunHistory& run) {
  write_manifest(hidden_, {iteration_, files, run});  // syncs the folder too
  const auto damage = step_damage(hidden_, VerifyDepth::kSizes);
  TORCH_CHECK(damage.empty(), damage, ": something else writes to this folder; save again");
}

void StepWriter::commit(const std::vector<ManifestFile>& files, const RunHistory& run) {
  finish_folder(files, run);
  place();
  writing_ = nullptr;
  write_file_atomically(directory_ + "/" + kTracker, tracker_);
}

CheckpointStep StepWriter::step() const { return {final_, iteration_, name_ == kRelease}; }

void StepWriter::refuse_existing() const {
  const auto there = is_directory(directory_) ? find_in(directory_, step()) : std::nullopt;
  TORCH_CHECK(!there, there->folder, " exists already, and a converter replaces no step: give another folder, or --overwrite");
}

std::string StepWriter::commit_beside_others(const std::vector<ManifestFile>& files,
                                             bool overwrite) {
  finish_folder(files, {});
  if (!overwrite) refuse_existing();
  const auto others = list_steps(directory_);
  std::optional<CheckpointStep> latest;
  try {
    latest = read_tracker(directory_);
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error&) {  // illegible, as if it were not there
  }
  if (!latest && !others.empty()) latest = others[0];
  place();
  writing_ = nullptr;
  const auto tracker = directory_ + "/" + kTracker;
  if (latest && is_newer(*latest, step()))
    return latest->folder + " is newer and stays the step that a run loads; write " + tracker_ +
           " into " + tracker + " to load " + name_;
  write_file_atomically(tracker, tracker_);
  return "";
}

void StepWriter::place() {
  if (!path_exists(final_)) {
    rename_durably(hidden_, final_);
    return;
  }
  replace_folder(final_, hidden_, directory_ + "/" + hidden_name(name_, kAside));
}

void StepWriter::abandon() noexcept {
  if (!writing_) return;  // not begun, or done
  try {
    const auto aside = directory_ + "/" + hidden_name(name_, kAside);
    remove_directory(hidden_);
    if (path_exists(final_)) {
      remove_directory(aside);
    } else if (path_exists(aside)) {
      rename_durably(aside, final_);
    }
    writing_ = nullptr;
  } catch (const std::exception&) {  // the next save tries again, and tells
  }
}

}  // namespace megashard
