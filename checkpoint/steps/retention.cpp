#include "checkpoint/steps/retention.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
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

namespace {

constexpr const char* kMark = "best_checkpoint.json";
constexpr int64_t kMaxMarkBytes = 1024;

std::string mark_of(const std::string& directory) { return directory + "/" + kMark; }

}  // namespace

std::optional<BestStep> read_best_step(const std::string& directory) {
  const auto path = mark_of(directory);
  if (!path_exists(path)) return std::nullopt;
  const auto mark = nlohmann::json::parse(read_small_file(path, kMaxMarkBytes), nullptr, /*allow_exceptions=*/false);
  const auto has = [&](const char* key) { return mark.is_object() && mark.contains(key) && mark[key].is_number(); };
  TORCH_CHECK(has("iteration") && mark["iteration"].is_number_unsigned() && has("validation_loss"), path,
              " does not hold the iteration and the validation_loss of a step; remove it, and no step is the best one");
  return BestStep{mark["iteration"].get<int64_t>(), mark["validation_loss"].get<double>()};
}

std::optional<CheckpointStep> step_of(const BestStep& best, const std::string& directory) {
  for (const auto& step : list_steps(directory)) {
    if (!step.is_release && step.iteration == best.iteration) return step;
  }
  return std::nullopt;
}

void mark_best_step(const std::string& directory, const BestStep& best) {
  const nlohmann::ordered_json mark = {{"iteration", best.iteration}, {"validation_loss", best.validation_loss}};
  write_file_atomically(mark_of(directory), mark.dump() + "\n");
}

void unmark_best_step(const std::string& directory) { remove_directory(mark_of(directory)); }

std::string resolve_best_step(const std::string& path) {
  auto whole = std::filesystem::path(path);
  if (!whole.has_filename()) whole = whole.parent_path();  // "DIRECTORY/best/"
  if (whole.filename() != "best" || path_exists(path)) return path;
  const std::string directory = whole.has_parent_path() ? whole.parent_path().string() : ".";
  const auto best = read_best_step(directory);
  TORCH_CHECK_VALUE(best, directory, " has no ", kMark,
                    ", which names the best step: train with --save-best, or name a ", "step's folder");
  const auto step = step_of(*best, directory);
  TORCH_CHECK_VALUE(step, mark_of(directory), " names iteration ", best->iteration, ", which is not there any more");
  return step->folder;
}

}  // namespace megashard
