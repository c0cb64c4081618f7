#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace megashard {

/// One step of a training's checkpoints: DIRECTORY/iter_0000010, or DIRECTORY/release as converters
/// write it.
struct CheckpointStep {
  std::string folder;
  int64_t iteration = 0;  ///< 0 for release
  bool is_release = false;
};

/// The step that DIRECTORY/latest_checkpointed_iteration.txt names; nothing when there is no such
/// file. Throws a sentence when the file holds something else, or the step's folder is not there.
std::optional<CheckpointStep> latest_step(const std::string& directory);
/// The step of that iteration (--ckpt-step); throws when it is not there.
CheckpointStep step_at(const std::string& directory, int64_t iteration);

/// A step being written. The files go into a hidden folder; commit() makes it a step at once, and
/// then the latest. Until then readers see what was there before, and a crash leaves only the
/// hidden folder, which the next save of the step replaces. To be used by one rank; the others
/// write into folder().
class StepWriter {
 public:
  StepWriter(std::string directory, int64_t iteration);
  static StepWriter release(std::string directory);  ///< DIRECTORY/release

  const std::string& folder() const { return hidden_; }
  void begin();   ///< creates the folder, empty
  void commit();  ///< syncs the folder, renames it, syncs the parent, then moves the tracker

 private:
  StepWriter(std::string directory, const std::string& name, std::string tracker);

  std::string directory_;
  std::string hidden_;
  std::string final_;
  std::string tracker_;
};

}  // namespace megashard
