#include "launch/report/reported_trace.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

using json = nlohmann::ordered_json;  // keeps memory classes in the file's order
/// Sorted, disjoint intervals.
using Stretches = std::vector<std::pair<double, double>>;

Stretches merged(Stretches all) {
  std::sort(all.begin(), all.end());
  Stretches out;
  for (const auto& [begin, end] : all) {
    if (!out.empty() && begin <= out.back().second) {
      out.back().second = std::max(out.back().second, end);
    } else {
      out.emplace_back(begin, end);
    }
  }
  return out;
}

/// The parts of `from` outside all intervals of `without`.
Stretches rest_of(const Stretches& from, const Stretches& without) {
  Stretches out;
  auto next = without.begin();
  for (auto [begin, end] : from) {
    while (next != without.end() && next->second <= begin) ++next;
    for (auto each = next; each != without.end() && each->first < end; ++each) {
      if (each->first > begin) out.emplace_back(begin, each->first);
      begin = std::max(begin, each->second);
    }
    if (begin < end) out.emplace_back(begin, end);
  }
  return out;
}

double length_of(const Stretches& stretches) {
  double length = 0;
  for (const auto& [begin, end] : stretches) length += end - begin;
  return length;
}

bool is_communication(const std::string& name) {
  constexpr std::array<std::string_view, 7> kBegins = {"FSDP::",     "nccl",       "all_gather", "reduce_scatter",
                                                       "all_reduce", "all_to_all", "broadcast"};
  return std::ranges::any_of(kBegins, [&](std::string_view begin) { return name.starts_with(begin); });
}

std::string text_of(const json& event, const char* key) {
  const auto found = event.find(key);
  if (found == event.end()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

bool is_of_gpu(const json& event) {
  const auto category = text_of(event, "cat");
  return category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset";
}

/// True for events with a duration, except the profiler's own marks.
bool is_span(const json& event) {
  if (!event.is_object() || text_of(event, "ph") != "X" || text_of(event, "cat") == "Trace") return false;
  const auto begin = event.find("ts"), length = event.find("dur");
  return begin != event.end() && length != event.end() && begin->is_number() && length->is_number();
}

json trace_events(const std::string& path) {
  std::ifstream file(path);
  require(file.good(), path + " cannot be read; give a trace of --profile or of plan --trace.");
  json trace = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (trace.is_object() && trace.contains("traceEvents")) trace = json(std::move(trace["traceEvents"]));
  require(trace.is_array(), path + " is no Chrome trace; give a file of --profile or of plan --trace.");
  return trace;
}

bool is_memory(const json& event) {
  if (!event.is_object() || text_of(event, "ph") != "C" || text_of(event, "name") != "memory") return false;
  const auto at = event.find("ts"), parts = event.find("args");
  return at != event.end() && at->is_number() && parts != event.end() && parts->is_object();
}

/// Adds a counter sample; classes that appear later are empty before.
void add_memory(const json& event, double at, ReportedTrace& trace) {
  ReportedTrace::Memory sample{.at = at};
  for (const auto& [name, bytes] : event["args"].items()) {
    if (!bytes.is_number()) continue;
    auto& classes = trace.memory_classes;
    const auto place = static_cast<size_t>(std::ranges::find(classes, name) - classes.begin());
    if (place == classes.size()) classes.push_back(name);
    sample.bytes.resize(classes.size());
    sample.bytes[place] = bytes.get<double>();
  }
  trace.memory.push_back(std::move(sample));
}

void work_out_times(ReportedTrace& trace) {
  Stretches communication, busy, computes;
  for (const auto& row : trace.rows) {
    Stretches all, communicates;
    for (const auto& span : row.spans) {
      all.emplace_back(span.begin, span.end);
      if (span.communicates) communicates.emplace_back(span.begin, span.end);
    }
    const auto compute = rest_of(merged(all), merged(communicates));
    if (length_of(compute) > length_of(computes)) computes = compute;
    communication.insert(communication.end(), communicates.begin(), communicates.end());
    busy.insert(busy.end(), all.begin(), all.end());
  }
  communication = merged(std::move(communication));
  trace.compute = length_of(computes);
  trace.communication = length_of(communication);
  trace.exposed = length_of(rest_of(communication, computes));
  trace.idle = std::max(0.0, trace.seconds - length_of(merged(std::move(busy))));
}

}  // namespace

ReportedTrace read_trace(const std::string& path) {
  constexpr double kMicroseconds = 1e-6;
  const json events = trace_events(path);
  const bool has_gpu = std::ranges::any_of(events, is_of_gpu);
  ReportedTrace trace{.path = path};
  std::map<std::string, ReportedTrace::Row> rows;
  double first = 0, last = 0;
  for (const auto& event : events) {
    if (is_memory(event)) add_memory(event, event["ts"].get<double>() * kMicroseconds, trace);
    if (!is_span(event) || (has_gpu && !is_of_gpu(event))) continue;
    const double begin = event["ts"].get<double>() * kMicroseconds;
    const double end = begin + event["dur"].get<double>() * kMicroseconds;
    first = rows.empty() ? begin : std::min(first, begin);
    last = rows.empty() ? end : std::max(last, end);
    const bool is_thread = text_of(event, "cat") == "cpu_op" || text_of(event, "cat") == "user_annotation";
    auto& row = rows[text_of(event, "tid")];
    row.name = (is_thread ? "thread " : "stream ") + text_of(event, "tid");
    const auto name = text_of(event, "name");
    row.spans.push_back({begin, end, is_communication(name), name});
  }
  require(!rows.empty(), path + " has no operators in it; give a file of --profile or of plan --trace.");
  for (auto& [id, row] : rows) {
    for (auto& span : row.spans) span.begin -= first, span.end -= first;
    std::ranges::sort(row.spans, {}, &ReportedTrace::Span::begin);
    trace.rows.push_back(std::move(row));
  }
  for (auto& sample : trace.memory) {
    sample.at -= first;
    sample.bytes.resize(trace.memory_classes.size());
  }
  std::ranges::stable_sort(trace.memory, {}, &ReportedTrace::Memory::at);
  trace.seconds = last - first;
  work_out_times(trace);
  return trace;
}

}  // namespace megashard
