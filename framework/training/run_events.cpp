#include "framework/training/run_events.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "framework/arguments/argument_table.h"
#include "framework/training/training_log.h"

namespace megashard {
namespace {

using nlohmann::ordered_json;

ordered_json event_of(const char* name, int64_t step) {
  return {{"event", name}, {"time", log_time_now()}, {"step", step}};
}

/// Paths may hold bytes that are no UTF-8.
std::string line_of(const ordered_json& event) {
  return event.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string absolute(const std::string& path) {
  std::error_code error;
  const auto whole = std::filesystem::absolute(path, error);
  return error ? path : whole.string();
}

}  // namespace

std::string events_path(const std::string& metrics_file) { return metrics_file + ".events"; }

void RunEvents::open(const std::string& metrics_file, int64_t loaded_step) {
  std::error_code error;  // of a file that cannot be asked
  if (!std::filesystem::is_regular_file(metrics_file, error)) return;
  file_.open(events_path(metrics_file), /*anew=*/loaded_step == 0);
}

void RunEvents::start(const Arguments& arguments, const Progress& progress) {
  auto line = event_of("start", progress.step);
  line["folder"] = absolute(".");
  line["world_size"] = arguments.world_size;
  auto& given = line["arguments"] = ordered_json::object();
  const auto defaults = argument_values(Arguments());
  for (const auto& named : recorded_arguments(arguments, progress)) {
    if (std::ranges::find(defaults, named) == defaults.end()) given[named.first] = argument_text(named.second);
  }
  file_.append(line_of(line));
}

void RunEvents::memory(const MemoryPeak& peak) {
  auto line = event_of("memory", peak.iteration);
  line["peak"] = peak.bytes;
  for (const auto& [what, bytes] : peak.parts) line["parts"][what] = bytes;
  file_.append(line_of(line));
}

void RunEvents::profile(const std::string& path, int64_t step) {
  auto line = event_of("profile", step);
  line["path"] = absolute(path);
  file_.append(line_of(line));
}

void RunEvents::save_failed(const std::string& why, int64_t step) {
  auto line = event_of("save_failed", step);
  line["why"] = why;
  file_.append(line_of(line));
}

void RunEvents::end(const std::string& how, int64_t step) {
  auto line = event_of("end", step);
  line["how"] = how;
  file_.append(line_of(line));
}

}  // namespace megashard
