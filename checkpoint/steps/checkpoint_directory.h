#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/steps/manifest.h"

namespace megashard {

/// One step of a training's checkpoints: DIRECTORY/iter_0000010, or DIRECTORY/release as converters
/// write it.
struct CheckpointStep {
  std::string folder;
  int64_t iteration = 0;  ///< 0 for release
  bool is_release = false;
  std::vector<int64_t> passed_over{};  ///< iterations of newer ones that find_step found damaged
};

/// The step of that name, iter_0000010 (iter_10 is the same) or release, in `folder`; nothing for
/// another name.
std::optional<CheckpointStep> step_named(const std::string& name, const std::string& folder);
/// What DIRECTORY/latest_checkpointed_iteration.txt names, whether it is there or not; nothing when
/// there is no such file. Throws when the file holds something else.
std::optional<CheckpointStep> read_tracker(const std::string& directory);
bool has_tracker(const std::string& directory);
/// The same of that file's content.
CheckpointStep parse_tracker(std::string_view text, const std::string& directory);
/// As read_tracker; throws when the step's folder is not there.
std::optional<CheckpointStep> latest_step(const std::string& directory);
/// All steps, damaged ones too, the newest first, `release` last. One whose replacement was cut
/// short (see StepWriter::commit) is found under its hidden name.
std::vector<CheckpointStep> list_steps(const std::string& directory);
/// The step of that iteration (--ckpt-step); throws when it is not there.
CheckpointStep step_at(const std::string& directory, int64_t iteration);
/// A step being written, as an AtomicFolder; commit() makes it a step at once, and then the latest.
/// To be used by one rank; the others write into folder().
class StepWriter {
 public:
  StepWriter(std::string directory, int64_t iteration);
  static StepWriter release(std::string directory);  ///< DIRECTORY/release

  const std::string& folder() const { return folder_.hidden(); }
  /// Creates the folder, empty, after removing what saves that were cut short have left.
  void begin();
  /// `files`: all that is in the folder, synced; `run`: whose step it is. Writes the manifest,
  /// renames the folder, moves the tracker, each of them durably. A step of that name is replaced.
  void commit(const std::vector<WrittenFile>& files, const RunHistory& run = {});

  // For converters, which may write beside a running training.

  /// Throws when a step of that name or iteration is there: converters replace none unasked.
  void refuse_existing() const;
  /// As begin(), without looking at other steps' hidden folders.
  void begin_converted();
  /// As commit(), for a step that is no training's next one: none is replaced, unless `overwrite`,
  /// and a tracker never goes back. Where it names a newer step (any iteration is newer than
  /// `release`), or is not there or illegible and there is a newer step, it stays as it is. Returns
  /// a line that says so; empty: the tracker names the new step.
  std::string commit_converted(const std::vector<WrittenFile>& files, bool overwrite = false);
  /// After a failure: frees the disk, as far as that goes. Does not throw.
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
