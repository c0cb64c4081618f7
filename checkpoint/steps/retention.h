#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

}  // namespace megashard
