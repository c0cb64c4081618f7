#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"

namespace megashard {

/// The step of a training's folder that had the lowest validation loss. DIRECTORY/best_checkpoint.json names it:
///   {"iteration": 40, "validation_loss": 4.0203}
/// remove_old_steps never removes it.
struct BestStep {
  int64_t iteration = 0;
  double validation_loss = 0;
};

/// Nothing when there is no such file. Throws, naming it, when it holds something else.
std::optional<BestStep> read_best_step(const std::string& directory);
/// Where it is; nothing when it is not there any more.
std::optional<CheckpointStep> step_of(const BestStep& best, const std::string& directory);
/// Replaces the file at once. The step must be there.
void mark_best_step(const std::string& directory, const BestStep& best);
/// No step is the best one any more.
void unmark_best_step(const std::string& directory);

/// The folder that "DIRECTORY/best" means: that of the marked step. Any other path, and one that is there itself, stays
/// as it is. Throws when no step is marked, or when it is not there.
std::string resolve_best_step(const std::string& path);

}  // namespace megashard
