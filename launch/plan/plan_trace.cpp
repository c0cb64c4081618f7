#include "launch/plan/plan_trace.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "framework/diagnostics.h"

namespace megashard {

void write_plan_trace(const std::string& path, const std::vector<PlannedSpan>& spans) {
  double begin = spans.empty() ? 0 : spans.front().begin;
  for (const auto& span : spans) begin = std::min(begin, span.begin);
  auto events = nlohmann::json::array();
  for (const auto& span : spans) {
    events.push_back({{"name", span.unit.empty() ? span.name : span.name + " (" + span.unit + ")"},
                      {"ph", "X"},
                      {"ts", 1e6 * (span.begin - begin)},
                      {"dur", 1e6 * span.seconds},
                      {"pid", 0},
                      {"tid", span.stream}});
  }
  std::ofstream file(path);
  file << nlohmann::json{{"traceEvents", std::move(events)}} << "\n";
  file.close();
  if (!file) throw UsageError("--trace " + path + " cannot be written; give another path.");
}

}  // namespace megashard
