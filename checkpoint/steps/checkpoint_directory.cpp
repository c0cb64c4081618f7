#include "checkpoint/steps/checkpoint_directory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"

namespace megashard {
namespace {

constexpr const char* kTracker = "latest_checkpointed_iteration.txt";
constexpr const char* kRelease = "release";
constexpr int64_t kMaxTrackerBytes = 1024;
constexpr const char* kPrefix = "iter_";

/// True for a step's folder name, hidden or not.
bool is_step_name(const std::string& name) { return name == kRelease || name.starts_with(kPrefix); }

std::string step_name(int64_t iteration) {
  TORCH_CHECK_VALUE(iteration >= 0, "a checkpoint's iteration cannot be ", iteration);
  auto digits = std::to_string(iteration);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return kPrefix + digits;
}

std::string name_of(const CheckpointStep& step) { return std::filesystem::path(step.folder).filename().string(); }

std::string steps_there(const std::string& directory) {
  std::string text;
  for (const auto& step : list_steps(directory)) text = name_of(step) + (text.empty() ? "" : ", ") + text;
  return text.empty() ? "there are no steps in it" : "it has " + text;
}

bool is_newer(const CheckpointStep& one, const CheckpointStep& other) {
  return one.is_release != other.is_release ? other.is_release : one.iteration > other.iteration;
}

/// The step, or the old one that is being replaced.
std::optional<CheckpointStep> find_in(const std::string& directory, const CheckpointStep& step) {
  for (const auto& there : list_steps(directory)) {
    if (there.is_release == step.is_release && there.iteration == step.iteration) return there;
  }
  return std::nullopt;
}

CheckpointStep existing(const CheckpointStep& step, const std::string& directory, const std::string& asked_by) {
  const auto found = is_directory(directory) ? find_in(directory, step) : std::nullopt;
  TORCH_CHECK_VALUE(found, asked_by, " asks for ", step.folder,
                    ", which is not there: ", is_directory(directory) ? steps_there(directory) : "nor is its parent");
  return *found;
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
  return parse_tracker(read_small_file(path, kMaxTrackerBytes), directory);
}

CheckpointStep parse_tracker(std::string_view text, const std::string& directory) {
  text = text.substr(0, text.find_last_not_of("\n\r \t") + 1);
  if (text == kRelease) return CheckpointStep{directory + "/" + kRelease, 0, true, {}};
  int64_t iteration = -1;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), iteration);
  const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size() && iteration >= 0;
  TORCH_CHECK(whole, directory, "/", kTracker, " should hold an iteration or the word release; it holds \"",
              text.substr(0, 40), "\"");
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
    const auto aside = name_of_aside(name);
    const bool replaced = !aside.empty() && path_exists(directory + "/" + aside);
    const auto step = step_named(aside.empty() ? name : aside, path);
    if (step && !replaced && is_directory(path)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), is_newer);
  return steps;
}

CheckpointStep step_at(const std::string& directory, int64_t iteration) {
  return existing({directory + "/" + step_name(iteration), iteration, false, {}}, directory, "--ckpt-step");
}

StepWriter::StepWriter(std::string directory, const std::string& name, std::string tracker, CheckpointStep step)
    : directory_(std::move(directory)),
      tracker_(std::move(tracker)),
      step_(std::move(step)),
      folder_(directory_ + "/" + name) {
  step_.folder = folder_.path();
}

StepWriter::StepWriter(std::string directory, int64_t iteration)
    : StepWriter(std::move(directory), step_name(iteration), std::to_string(iteration), {{}, iteration, false}) {}

StepWriter StepWriter::release(std::string directory) {
  return {std::move(directory), kRelease, kRelease, {{}, 0, true}};
}

void StepWriter::begin() {
  make_directories(directory_);
  remove_leftovers(directory_, is_step_name);
  begin_converted();
}

void StepWriter::begin_converted() { folder_.begin(); }

void StepWriter::finish_folder(const std::vector<WrittenFile>& files, const RunHistory& run) {
  write_manifest(folder(), {step_.iteration, files, run});  // also syncs the folder
  const auto damage = step_damage(folder(), VerifyDepth::kSizes);
  TORCH_CHECK(damage.empty(), damage, ": something else writes to this folder; save again");
}

void StepWriter::commit(const std::vector<WrittenFile>& files, const RunHistory& run) {
  finish_folder(files, run);
  folder_.publish();
  write_file_atomically(directory_ + "/" + kTracker, tracker_);
}

void StepWriter::refuse_existing() const {
  const auto there = is_directory(directory_) ? find_in(directory_, step_) : std::nullopt;
  TORCH_CHECK_VALUE(!there, there->folder,
                    " exists already, and a converter replaces no step: give another folder, or --overwrite");
}

std::string StepWriter::commit_converted(const std::vector<WrittenFile>& files, bool overwrite) {
  finish_folder(files, {});
  if (!overwrite) refuse_existing();
  const auto others = list_steps(directory_);
  std::optional<CheckpointStep> latest;
  try {
    latest = read_tracker(directory_);
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error&) {  // invalid: treated as missing
  }
  if (!latest && !others.empty()) latest = others[0];
  folder_.publish();
  const auto tracker = directory_ + "/" + kTracker;
  if (latest && is_newer(*latest, step_))
    return latest->folder + " is newer and stays the step that a run loads; write " + tracker_ + " into " + tracker +
           " to load " + name_of(step_);
  write_file_atomically(tracker, tracker_);
  return "";
}

}  // namespace megashard
