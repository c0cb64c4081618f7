#include "checkpoint/steps/retention.h"

#include <algorithm>

#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"

namespace megashard {

void remove_old_steps(const std::string& directory, int64_t newest, const RetentionPolicy& policy) {
  if (!policy.most_recent && !policy.interval) return;
  verify_step(step_at(directory, newest).folder, VerifyDepth::kSizes);
  int64_t kept = 1;
  for (const auto& step : list_steps(directory)) {
    if (step.is_release || step.iteration >= newest) continue;
    const auto& damaged = policy.damaged;
    const bool is_known =
        std::find(damaged.begin(), damaged.end(), step.iteration) != damaged.end();
    const bool recent = kept < policy.most_recent.value_or(1) && !is_known &&
                        step_damage(step.folder, VerifyDepth::kSizes).empty();
    if (recent) {
      ++kept;
    } else if (!policy.interval || step.iteration % *policy.interval != 0) {
      remove_step(directory, step);
    }
  }
}

}  // namespace megashard
