#include "framework/training/memory_log.h"

#include <algorithm>
#include <cstdio>
#include <unordered_set>
#include <utility>

namespace megashard {
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
  return {{"sharded parameters", parameters_},
          {"gradients", held.gradients},
          {"optimizer state", held.optimizer},
          {"unsharded parameters", use.unsharded},
          {"communication buffers", use.communication},
          {"activations and the rest", std::max<int64_t>(0, bytes - known)}};
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

}  // namespace megashard
