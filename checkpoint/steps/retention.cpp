#include "checkpoint/steps/retention.h"

#include <algorithm>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/files/unreadable_error.h"
#include "checkpoint/steps/best_step.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"

namespace megashard {
namespace {

/// A step known to be damaged does not count as recent, and may have no readable run; other steps without a readable
/// run are of unknown runs.
Kinship kinship_of(const RunHistory& run, const CheckpointStep& step, bool is_known) {
  try {
    const auto kin = kinship(run, run_of_step(step.folder).id, step.iteration);
    return is_known && kin == Kinship::kOwn ? Kinship::kLeft : kin;
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error&) {
    return is_known ? Kinship::kLeft : Kinship::kOther;
  }
}

}  // namespace

void remove_old_steps(const std::string& directory, int64_t newest, const RetentionPolicy& policy) {
  if (!policy.removes()) return;
  const auto latest = step_at(directory, newest);
  verify_step(latest.folder, VerifyDepth::kSizes);
  const auto run = run_of_step(latest.folder);
  const auto best = read_best_step(directory);
  const int64_t max_recent = policy.most_recent.value_or(1);
  const bool keeps_all = !policy.most_recent && !policy.interval;
  int64_t kept = 1;
  for (const auto& step : list_steps(directory)) {
    if (step.is_release || step.iteration == newest) continue;
    if (step.iteration > newest && !policy.other_runs) continue;
    const bool stays =
        (policy.interval && step.iteration % *policy.interval == 0) || (best && step.iteration == best->iteration);
    if (stays && kept >= max_recent && !policy.other_runs) continue;
    const auto& damaged = policy.damaged;
    const bool is_known = std::find(damaged.begin(), damaged.end(), step.iteration) != damaged.end();
    const auto kin = kinship_of(run, step, is_known);
    if (kin == Kinship::kOther) {
      if (policy.other_runs) remove_atomically(step.folder);
      continue;
    }
    if (step.iteration > newest || keeps_all) continue;
    const bool recent =
        kept < max_recent && kin == Kinship::kOwn && step_damage(step.folder, VerifyDepth::kSizes).empty();
    if (recent) {
      ++kept;
    } else if (!stays) {
      remove_atomically(step.folder);
    }
  }
}

}  // namespace megashard
