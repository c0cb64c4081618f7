#include "launch/report/reported_run.h"

#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/retention.h"
#include "framework/diagnostics.h"
#include "framework/training/run_events.h"
#include "framework/training/training_log.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

std::string metrics_file_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    require(fs::exists(path, error), path + " is not there; give the file of --metrics-file, or its folder.");
    return path;
  }
  if (const auto usual = fs::path(path) / "metrics.jsonl"; fs::exists(usual, error)) return usual;
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    if (entry.path().extension() == ".jsonl") found.push_back(entry.path());
  }
  require(!error, path + " cannot be listed: " + error.message() + ".");
  require(!found.empty(), path + " has no metrics file (*.jsonl); train with --metrics-file, or give the file.");
  require(found.size() == 1, path + " has several .jsonl files and no metrics.jsonl; give the file.");
  return found.front();
}

/// Calls `take` for each complete line. Throws if a line is not a JSON object.
void for_each_object(const std::string& path, const std::string& what,
                     const std::function<void(const ordered_json& object)>& take) {
  std::ifstream file(path);
  require(file.good(), path + " cannot be read; check its permissions.");
  int64_t number = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) {  // eof: truncated
    ++number;
    const auto object = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    require(object.is_object(),
            path + ":" + std::to_string(number) + " is no JSON object; " + what + " has one on each line.");
    take(object);
  }
}

template <class T>
T field(const ordered_json& object, const char* key, T otherwise) {
  const auto found = object.find(key);
  if (found == object.end()) return otherwise;
  const bool fits = std::is_same_v<T, std::string> ? found->is_string() : found->is_number_integer();
  return fits ? found->template get<T>() : otherwise;
}

/// Returns the last step before steps were repeated: 169 for 150, if 151 follows 169.
std::map<int64_t, int64_t> read_steps_of(ReportedRun& run) {
  std::map<int64_t, int64_t> redone;
  std::map<int64_t, std::map<std::string, double>> steps;
  for_each_object(run.metrics_file, "a metrics file", [&](const ordered_json& object) {
    const auto step = field<int64_t>(object, "step", 0);
    if (step <= 0) return;
    if (const auto again = steps.lower_bound(step); again != steps.end()) {
      redone[step - 1] = steps.rbegin()->first;
      steps.erase(again, steps.end());
    }
    auto& numbers = steps[step];
    for (const auto& [key, value] : object.items()) {
      if (key != "step") numbers[key] = value.is_number() ? value.get<double>() : kNoNumber;
    }
  });
  require(!steps.empty(), run.metrics_file + " has no step yet; try again when the run has done one.");
  for (const auto& [step, numbers] : steps) {
    for (const auto& [key, value] : numbers) {
      auto& of_key = run.numbers[key];
      of_key.resize(run.steps.size(), kNoNumber);
      of_key.push_back(value);
    }
    run.steps.push_back(static_cast<double>(step));
  }
  for (auto& [key, values] : run.numbers) values.resize(run.steps.size(), kNoNumber);
  return redone;
}

void take_start(ReportedRun& run, const ordered_json& event) {
  run.starts.push_back({.time = field<std::string>(event, "time", ""),
                        .step = field<int64_t>(event, "step", 0),
                        .world_size = field<int64_t>(event, "world_size", 0)});
  run.arguments.clear();
  const auto arguments = event.find("arguments");
  if (arguments == event.end() || !arguments->is_object()) return;
  for (const auto& [name, value] : arguments->items()) {
    if (value.is_string()) run.arguments[name] = value.get<std::string>();
  }
  if (run.arguments.contains("save"))
    run.save = fs::path(field<std::string>(event, "folder", "")) / run.arguments["save"];
}

void take_memory(ReportedRun& run, const ordered_json& event) {
  ReportedRun::Memory memory{.step = field<int64_t>(event, "step", 0), .bytes = field<int64_t>(event, "peak", 0)};
  if (run.memory && memory.bytes < run.memory->bytes) return;
  if (const auto parts = event.find("parts"); parts != event.end() && parts->is_object()) {
    for (const auto& [name, bytes] : parts->items())
      if (bytes.is_number_integer()) memory.parts.emplace_back(name, bytes.get<int64_t>());
  }
  run.memory = std::move(memory);
}

void read_events_of(ReportedRun& run) {
  const auto path = events_path(run.metrics_file);
  std::error_code error;
  if (!fs::exists(path, error)) return;
  for_each_object(path, "a file of events", [&](const ordered_json& event) {
    const auto name = field<std::string>(event, "event", "");
    if (name == "start") take_start(run, event);
    if (name == "memory") take_memory(run, event);
    if (name == "save_failed") {
      run.failed_saves.push_back({.time = field<std::string>(event, "time", ""),
                                  .step = field<int64_t>(event, "step", 0),
                                  .why = field<std::string>(event, "why", "")});
    }
    if (name == "profile") run.traces.push_back(field<std::string>(event, "path", ""));
    if (name == "end" && !run.starts.empty()) run.starts.back().end = field<std::string>(event, "how", "");
  });
  std::sort(run.traces.begin(), run.traces.end());
  run.traces.erase(std::unique(run.traces.begin(), run.traces.end()), run.traces.end());
}

/// Sets the last step of each start: before the next start, or of the file.
void take_last_steps(ReportedRun& run, const std::map<int64_t, int64_t>& redone) {
  for (size_t i = 0; i < run.starts.size(); ++i) {
    if (i + 1 == run.starts.size()) {
      run.starts[i].last = static_cast<int64_t>(run.steps.back());
    } else {
      const auto next = run.starts[i + 1].step;
      const auto found = redone.find(next);
      run.starts[i].last = found == redone.end() ? next : found->second;
    }
  }
}

ReportedRun::Checkpoint checkpoint_of(const CheckpointStep& step) {
  ReportedRun::Checkpoint checkpoint{.name = fs::path(step.folder).filename()};
  std::error_code error;  // for files deleted meanwhile
  for (const auto& entry : fs::recursive_directory_iterator(step.folder, error)) {
    const auto size = entry.is_regular_file(error) ? entry.file_size(error) : 0;
    if (!error) checkpoint.bytes += static_cast<int64_t>(size);
  }
  struct stat status {};
  std::tm local{};
  if (::stat(step.folder.c_str(), &status) == 0 && localtime_r(&status.st_mtime, &local) != nullptr)
    checkpoint.time = log_time(local);
  return checkpoint;
}

/// Finds checkpoints of --save. If the run's folder was moved, or it has no events, they may be beside its metrics.
void find_checkpoints(ReportedRun& run) {
  const auto beside = fs::absolute(run.metrics_file).parent_path();
  std::vector<std::string> folders;
  if (!run.save.empty()) folders = {run.save, beside / fs::path(run.save).filename()};
  folders.push_back(beside);
  run.save.clear();
  std::error_code error;
  for (const auto& folder : folders) {
    if (!fs::is_directory(folder, error)) continue;
    const auto steps = list_steps(folder);
    if (steps.empty()) continue;
    run.save = folder;
    std::optional<CheckpointStep> latest;
    std::optional<BestStep> best;
    try {
      best = read_best_step(folder);
      latest = read_tracker(folder);
    } catch (const std::exception&) {  // invalid: none is the latest
    }
    for (const auto& step : steps) {
      run.checkpoints.push_back(checkpoint_of(step));
      run.checkpoints.back().is_latest =
          latest && latest->is_release == step.is_release && latest->iteration == step.iteration;
      run.checkpoints.back().is_best = best && !step.is_release && best->iteration == step.iteration;
    }
    return;
  }
}

}  // namespace

ReportedRun read_run(const std::string& path) {
  ReportedRun run{.name = path, .metrics_file = metrics_file_of(path)};
  const auto redone = read_steps_of(run);
  read_events_of(run);
  take_last_steps(run, redone);
  find_checkpoints(run);
  return run;
}

}  // namespace megashard
