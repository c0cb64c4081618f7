#include "checkpoint/steps/best_step.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/file_io.h"

namespace megashard {
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
