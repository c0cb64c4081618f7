#include "framework/training/memory_log.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace megashard {
namespace {

// A callback of LibTorch's is a plain function.
std::function<void()> after_operator;

}  // namespace

OperatorWatch::OperatorWatch(std::function<void()> after) {
  TORCH_INTERNAL_ASSERT(after_operator == nullptr);
  after_operator = std::move(after);
  const auto nothing = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; };
  const auto behind = [](const at::RecordFunction&, at::ObserverContext*) { after_operator(); };
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(nothing, behind).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
  after_operator = nullptr;
}

namespace {

constexpr double kGrowth = 1.01;  // of a peak that is worth telling

int64_t bytes_on(c10::Device device, const at::Tensor& tensor) {
  const bool counts = tensor.defined() && tensor.device().type() == device.type();
  return counts ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

std::string in_mib(const std::string& what, int64_t bytes) {
  char number[32];
  std::snprintf(number, sizeof number, "%.1f", static_cast<double>(bytes) / (1 << 20));
  return " | " + what + ": " + number;
}

}  // namespace

MemoryLog::MemoryLog(const torch::nn::Module& model, Optimizer& optimizer, c10::Device device, Sources sources)
    : model_(model),
      optimizer_(optimizer),
      device_(device),
      sources_(std::move(sources)),
      parameters_(parameter_bytes()),
      state_bytes_(optimizer_bytes()) {
  observe_memory_use([this](const MemoryUse& use) { look(use); });
}

MemoryLog::~MemoryLog() { observe_memory_use(nullptr); }

int64_t MemoryLog::optimizer_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, piece] : optimizer_.sharded_state_dict()) bytes += bytes_on(device_, piece.local);
  return bytes;
}

int64_t MemoryLog::parameter_bytes() const {
  int64_t bytes = 0;
  std::unordered_set<const c10::TensorImpl*> counted;  // tied ones have several names
  for (const auto& parameter : model_.parameters()) {
    if (counted.insert(parameter.unsafeGetTensorImpl()).second) bytes += bytes_on(device_, parameter);
  }
  return bytes;
}

MemoryLog::Held MemoryLog::held_now(const MemoryUse& use) const {
  Held held{.use = use, .optimizer = state_bytes_};
  for (const auto& parameter : optimizer_.parameters()) {
    const at::Tensor& gradient = parameter.grad();
    const int64_t bytes = bytes_on(device_, gradient);
    held.gradients += bytes;
    if (bytes > 0 && is_counted_communication(gradient)) held.use.communication -= bytes;  // counted once
  }
  return held;
}

void MemoryLog::look(const MemoryUse& use) {
  const int64_t live = sources_.live_bytes();
  if (live <= fullest_) return;
  fullest_ = live;
  held_ = held_now(use);
}

MemoryParts MemoryLog::parts_of(const Held& held, int64_t bytes) const {
  const auto& use = held.use;
  const int64_t known = parameters_ + held.gradients + held.optimizer + use.unsharded + use.communication;
  return {
      {"sharded parameters", parameters_},          {"gradients", held.gradients},
      {"optimizer state", held.optimizer},          {"unsharded parameters", use.unsharded},
      {"communication buffers", use.communication}, {"activations and the rest", std::max<int64_t>(0, bytes - known)}};
}

MemoryParts MemoryLog::now() const {
  // What a CPU's pool hands out is not what was there before the training.
  const int64_t before = device_.is_cpu() ? parameters_ + state_bytes_ : 0;
  return parts_of(held_now(memory_use()), before + sources_.live_bytes());
}

std::optional<MemoryPeak> MemoryLog::grown(int64_t iteration) {
  state_bytes_ = optimizer_bytes();
  const int64_t peak = sources_.peak_bytes();
  if (static_cast<double>(peak) <= kGrowth * static_cast<double>(logged_)) return std::nullopt;
  logged_ = peak;
  return MemoryPeak{.iteration = iteration, .bytes = peak, .parts = parts_of(held_, peak)};
}

std::string memory_line(const MemoryPeak& peak) {
  std::string line =
      "[Rank 0] (after " + std::to_string(peak.iteration) + " iterations) memory (MiB)" + in_mib("peak", peak.bytes);
  for (const auto& [what, bytes] : peak.parts) line += in_mib(what, bytes);
  return line;
}

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

/// Position after `mark`, which a trace has exactly once.
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
