#include "checkpoint/steps/find_step.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/agreement.h"

namespace megashard {
namespace {

/// What the first rank has found out.
struct Search {
  std::vector<CheckpointStep> candidates;  ///< the best first
  std::string trouble;                     ///< with the tracker; empty: none
};

Search search(const std::string& directory, std::optional<int64_t> ckpt_step) {
  if (ckpt_step) return {{step_at(directory, *ckpt_step)}, ""};
  Search found;
  if (!is_directory(directory)) return found;
  auto steps = list_steps(directory);
  std::optional<CheckpointStep> latest;
  try {
    latest = read_tracker(directory);
    if (!latest && steps.empty()) return found;
    if (!latest) found.trouble = directory + " has steps, but no latest_checkpointed_iteration.txt";
  } catch (const c10::Error& error) {
    found.trouble = error.what_without_backtrace();
  }
  if (latest) {
    const auto unwanted = [&](const CheckpointStep& step) {
      return step.is_release != latest->is_release || step.iteration > latest->iteration;
    };
    steps.erase(std::remove_if(steps.begin(), steps.end(), unwanted), steps.end());
    if (steps.empty() || steps[0].iteration != latest->iteration)
      found.trouble = "there is no " + latest->folder + ", which the tracker names";
  }
  found.candidates = std::move(steps);
  TORCH_CHECK(!found.candidates.empty(), found.trouble, ", nor a step before it: check the path, or name a step with --ckpt-step");
  return found;
}

std::string encode_search(const Search& found) {
  std::ostringstream text;
  text << found.candidates.size() << '\n';
  for (const auto& step : found.candidates)
    text << step.folder << '\n' << step.iteration << ' ' << step.is_release << '\n';
  text << found.trouble;
  return text.str();
}

Search decode_search(const std::string& encoded) {
  std::istringstream text(encoded);
  std::string line;
  std::getline(text, line);
  Search found;
  found.candidates.resize(std::stoul(line));
  for (auto& step : found.candidates) {
    std::getline(text, step.folder);
    text >> step.iteration >> step.is_release;
    std::getline(text, line);
  }
  found.trouble.assign(std::istreambuf_iterator<char>(text), {});
  return found;
}

/// The first damage that a rank has found, on all ranks.
std::string damage_on_any_rank(const std::string& folder, VerifyDepth depth,
                               const ProcessGroupPtr& group) {
  const auto ranks = group == nullptr ? 1 : group->size();
  const auto found = gather_or_throw(group, [&] {
    return step_damage(folder, depth, static_cast<size_t>(rank_in(group)),
                       static_cast<size_t>(ranks));
  });
  for (const auto& damage : found) {
    if (!damage.empty()) return damage;
  }
  return "";
}

}  // namespace

std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        const FindOptions& options) {
  const auto answers = gather_or_throw(group, [&]() -> std::string {
    return rank_in(group) == 0 ? encode_search(search(directory, options.ckpt_step)) : "";
  });
  const auto [candidates, tracker_trouble] = decode_search(answers[0]);
  if (candidates.empty()) return std::nullopt;
  std::string trouble = tracker_trouble;
  for (const auto& step : candidates) {
    const auto damage = damage_on_any_rank(step.folder, options.depth, group);
    if (damage.empty()) {
      if (!trouble.empty() && options.notice)
        options.notice(trouble + "; " + step.folder + " is used instead");
      return step;
    }
    trouble += (trouble.empty() ? "" : "; ") + damage;
  }
  TORCH_CHECK(!options.ckpt_step, "--ckpt-step ", *options.ckpt_step, ": ", trouble,
              ": put back what is damaged from a copy, or name another step");
  TORCH_CHECK(false, trouble, "; ", directory, " has no whole step to use instead: put back what is damaged from a copy, or give an empty folder to start anew");
}

}  // namespace megashard
