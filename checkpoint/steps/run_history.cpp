#include "checkpoint/steps/run_history.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

namespace megashard {

RunHistory new_run() {
  std::random_device bits;
  char id[17];
  std::snprintf(id, sizeof id, "%08x%08x", bits(), bits());
  return {id, {}};
}

RunHistory gone_on_from(RunHistory run, int64_t iteration) {
  auto next = new_run();
  next.before = std::move(run.before);
  next.before.push_back({std::move(run.id), iteration});
  return next;
}

Kinship kinship(const RunHistory& run, const std::string& id, int64_t iteration) {
  if (id == run.id) return Kinship::kOwn;
  const auto is_its = [&](const RunHistory::Part& part) { return part.id == id; };
  const auto is_own = [&](const RunHistory::Part& part) { return part.id == id && iteration <= part.last; };
  const auto& parts = run.before;
  if (std::any_of(parts.begin(), parts.end(), is_own)) return Kinship::kOwn;
  return std::any_of(parts.begin(), parts.end(), is_its) ? Kinship::kLeft : Kinship::kOther;
}

}  // namespace megashard
