#include "framework/training/memory_counters.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <utility>

namespace megashard {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string text_of_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return std::move(text).str();
}

/// Behind what a trace has exactly once.
size_t place_behind(const std::string& trace, std::string_view mark) {
  const size_t at = trace.find(mark);
  TORCH_CHECK(at != std::string::npos, "a trace of LibTorch's profiler has no ", mark);
  return at + mark.size();
}

}  // namespace

MemoryCounters::MemoryCounters(const MemoryLog& log) : log_(log), watch_([this] { look(); }) {}

void MemoryCounters::look() {
  MemoryParts parts = log_.now();
  if (samples_.empty() || parts != samples_.back().parts) samples_.push_back({now_ns(), std::move(parts)});
}

void MemoryCounters::add_to(const std::string& trace_path) const {
  const std::string trace = text_of_file(trace_path);
  const int64_t base = std::stoll(trace.substr(place_behind(trace, "\"baseTimeNanoseconds\":"), 24));
  const size_t first_event = place_behind(trace, "\"traceEvents\": [");
  std::ofstream file(trace_path);
  file << std::string_view(trace).substr(0, first_event);
  for (const auto& [at, parts] : samples_) {
    auto bytes = nlohmann::ordered_json::object();  // drawn from below in this order
    for (const auto& [name, value] : parts) bytes[name] = value;
    file << "\n  "
         << nlohmann::ordered_json{{"name", "memory"},
                                   {"ph", "C"},
                                   {"ts", static_cast<double>(at - base) / 1e3},
                                   {"pid", ::getpid()},
                                   {"args", std::move(bytes)}}
         << ",";
  }
  file << std::string_view(trace).substr(first_event);
  file.close();
  TORCH_CHECK(file, trace_path, " cannot be written");
}

}  // namespace megashard
