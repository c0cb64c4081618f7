#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/steps/checkpoint_directory.h"

namespace megashard {

/// Selects the old steps to keep after a save; all, if nothing is set.
struct RetentionPolicy {
  std::optional<int64_t> most_recent{};  ///< --most-recent-k: keeps this many newest steps; unset: see interval
  std::optional<int64_t> interval{};     ///< --save-retain-interval: also keeps its multiples, as Megatron; alone, also
                                         ///< the newest step
  std::vector<int64_t> damaged{};        ///< known damaged steps, whatever their sizes: see below
  bool other_runs = false;               ///< removes all steps of other runs (--overwrite-run)

  bool removes() const { return most_recent || interval || other_runs; }
};

/// Removes steps before `newest` that the policy does not keep. Throws, and removes nothing, if `newest` is damaged.
/// Damaged steps, and steps that its run has left, do not count as recent. Never removes `newest`, `release`, the best
/// step of its run or later steps of its run; steps of other runs, also later ones, only if other_runs is set. Each
/// step is renamed to a hidden name and then deleted, so that a crash leaves no partial step. Called by one process,
/// after a commit.
void remove_old_steps(const std::string& directory, int64_t newest, const RetentionPolicy& policy);

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
