#include "launch/plan/plan_trace.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "framework/diagnostics.h"

namespace megashard {

void write_plan_trace(const std::string& path, const PlannedRun& run) {
  const auto& spans = run.step.spans;
  double begin = spans.empty() ? 0 : spans.front().begin;
  for (const auto& span : spans) begin = std::min(begin, span.begin);
  auto events = nlohmann::ordered_json::array();
  for (const auto& span : spans) {
    events.push_back({{"name", span.unit.empty() ? span.name : span.name + " (" + span.unit + ")"},
                      {"ph", "X"},
                      {"ts", 1e6 * (span.begin - begin)},
                      {"dur", 1e6 * span.seconds},
                      {"pid", 0},
                      {"tid", span.stream}});
  }
  for (const auto& [at, memory] : run.memory) {
    auto parts = nlohmann::ordered_json::object();  // drawn from bottom to top in this order
    for (const auto& [name, bytes] : memory.parts()) parts[name] = bytes;
    const double since_begin = std::max(0.0, 1e6 * (at - begin));
    events.push_back({{"name", "memory"}, {"ph", "C"}, {"ts", since_begin}, {"pid", 0}, {"args", std::move(parts)}});
  }
  std::ofstream file(path);
  file << nlohmann::ordered_json{{"traceEvents", std::move(events)}} << "\n";
  file.close();
  if (!file) throw UsageError("--trace " + path + " cannot be written; give another path.");
}

}  // namespace megashard
