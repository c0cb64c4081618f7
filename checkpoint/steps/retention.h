#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Which old steps stay after a save; nothing set: all.
struct RetentionPolicy {
  std::optional<int64_t> most_recent{};  ///< --most-recent-k: the newest so many; unset: see interval
  std::optional<int64_t> interval{};     ///< --save-retain-interval: also every multiple of it, as in
                                         ///< Megatron; alone, the newest step and these
  std::vector<int64_t> damaged{};        ///< known to be, whatever their lengths: see below
  bool other_runs = false;               ///< all steps of other runs go (--overwrite-run)

  bool removes() const { return most_recent || interval || other_runs; }
};

/// Removes the other steps before `newest`, which must be whole: throws otherwise, and removes
/// nothing. Damaged ones, and those that its run has left behind, do not count as recent. Never
/// removes `newest`, those after it, or `release`, and those of other runs only when that is asked.
/// Each vanishes by a rename to a hidden name and is then deleted, so a crash leaves nothing half
/// there. To be called by one process, after a commit.
void remove_old_steps(const std::string& directory, int64_t newest, const RetentionPolicy& policy);

}  // namespace megashard
