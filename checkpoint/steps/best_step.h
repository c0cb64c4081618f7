#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"

namespace megashard {

/// The step with the lowest validation loss in a training's folder, stored in DIRECTORY/best_checkpoint.json:
///   {"iteration": 40, "validation_loss": 4.0203}
/// remove_old_steps keeps it, unless it is another run's and RetentionPolicy::other_runs is set.
struct BestStep {
  int64_t iteration = 0;
  double validation_loss = 0;
};

/// Reads the file; nullopt if there is none. Throws an error that names it if its content is invalid.
std::optional<BestStep> read_best_step(const std::string& directory);
/// The step's folder; nullopt if it no longer exists.
std::optional<CheckpointStep> step_of(const BestStep& best, const std::string& directory);
/// Replaces the file atomically. The step must exist.
void mark_best_step(const std::string& directory, const BestStep& best);
/// Removes the mark.
void unmark_best_step(const std::string& directory);

/// Resolves "DIRECTORY/best" to the folder of the marked step. Returns other paths, and one that exists, unchanged.
/// Throws if no step is marked or if it no longer exists.
std::string resolve_best_step(const std::string& path);

}  // namespace megashard
