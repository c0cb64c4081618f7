#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/steps/manifest.h"

namespace megashard {

/// A step in a training's directory: DIRECTORY/iter_0000010, or DIRECTORY/release as written by converters.
struct CheckpointStep {
  std::string folder;
  int64_t iteration = 0;  ///< 0 for release
  bool is_release = false;
  std::vector<int64_t> passed_over{};  ///< iterations of newer steps that find_step found damaged
};

/// The step named iter_0000010 (same as iter_10) or release in `folder`; nullopt for other names.
std::optional<CheckpointStep> step_named(const std::string& name, const std::string& folder);
/// The step that DIRECTORY/latest_checkpointed_iteration.txt names, whether it exists or not; nullopt if there is no
/// such file. Throws if its content is invalid.
std::optional<CheckpointStep> read_tracker(const std::string& directory);
bool has_tracker(const std::string& directory);
/// As read_tracker, from the content of the file.
CheckpointStep parse_tracker(std::string_view text, const std::string& directory);
/// As read_tracker. Throws if the step's folder does not exist.
std::optional<CheckpointStep> latest_step(const std::string& directory);
/// All steps including damaged ones, newest first, `release` last. A step whose replacement was interrupted (see
/// StepWriter::commit) is listed with its hidden name.
std::vector<CheckpointStep> list_steps(const std::string& directory);
/// The step of an iteration (--ckpt-step). Throws if it does not exist.
CheckpointStep step_at(const std::string& directory, int64_t iteration);
/// Writes a step as an AtomicFolder; commit() publishes it and makes it the latest. Used by one rank; the others write
/// into folder().
class StepWriter {
 public:
  StepWriter(std::string directory, int64_t iteration);
  static StepWriter release(std::string directory);  ///< DIRECTORY/release

  const std::string& folder() const { return folder_.hidden(); }
  /// Creates the folder, empty, after removing leftovers of interrupted saves.
  void begin();
  /// Writes the manifest, renames the folder and updates the tracker, each durably. `files`: all files in the folder,
  /// synced; `run`: the run that writes the step. Replaces a step of the same name.
  void commit(const std::vector<WrittenFile>& files, const RunHistory& run = {});

  // For converters, which may write while a training is running.

  /// Throws if a step of that name or iteration exists: converters do not replace steps unless asked to.
  void refuse_existing() const;
  /// As begin(), but ignores other steps' hidden folders.
  void begin_converted();
  /// As commit(), for a step that does not continue the training: replaces a step only with `overwrite` and never moves
  /// the tracker back. The tracker is kept if it names a newer step (any iteration is newer than `release`), or if it
  /// is missing or invalid and a newer step exists. Returns a line that says so; empty if the tracker names the new
  /// step.
  std::string commit_converted(const std::vector<WrittenFile>& files, bool overwrite = false);
  /// Frees disk space after a failure, as far as possible. Does not throw.
  void abandon() noexcept { folder_.abandon(); }

 private:
  StepWriter(std::string directory, const std::string& name, std::string tracker, CheckpointStep step);

  void finish_folder(const std::vector<WrittenFile>& files, const RunHistory& run);

  std::string directory_;
  std::string tracker_;
  CheckpointStep step_;
  AtomicFolder folder_;
};

}  // namespace megashard
