#include "parallel/device/memory_use.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace megashard {
namespace {

struct UseCounts {
  std::array<std::atomic<int64_t>, 2> bytes{};  // by MemoryClass
  std::atomic<bool> observed{false};
  std::mutex mutex;  // for the observer and its calls
  std::function<void(const MemoryUse&)> observer;

  std::atomic<int64_t>& of(MemoryClass which) { return bytes[static_cast<size_t>(which)]; }
};

UseCounts& use_counts() {
  static auto* counts = new UseCounts;  // leaked: buffers may outlive static destruction
  return *counts;
}

struct CountedMemory {
  c10::DataPtr memory;
  int64_t bytes;
  MemoryClass of;
};

void give_counted_back(void* context) {
  const std::unique_ptr<CountedMemory> counted(static_cast<CountedMemory*>(context));
  use_counts().of(counted->of) -= counted->bytes;
}

}  // namespace

void observe_memory_use(std::function<void(const MemoryUse&)> observer) {
  auto& counts = use_counts();
  const std::lock_guard lock(counts.mutex);
  counts.observed = observer != nullptr;
  counts.observer = std::move(observer);
}

MemoryUse memory_use() {
  auto& counts = use_counts();
  return {.unsharded = counts.of(MemoryClass::kUnsharded), .communication = counts.of(MemoryClass::kCommunication)};
}

c10::DataPtr counted_memory(MemoryClass of, c10::DataPtr memory, size_t bytes) {
  auto& counts = use_counts();
  if (!counts.observed) return memory;
  void* const data = memory.get();
  const auto device = memory.device();
  auto counted = std::make_unique<CountedMemory>(std::move(memory), static_cast<int64_t>(bytes), of);
  counts.of(of) += counted->bytes;
  c10::DataPtr result(data, counted.release(), &give_counted_back, device);
  const std::lock_guard lock(counts.mutex);
  if (counts.observer) {
    counts.observer(memory_use());
  }
  return result;
}

bool is_counted_communication(const at::Tensor& tensor) {
  const auto& memory = tensor.storage().data_ptr();
  if (memory.get_deleter() != &give_counted_back) return false;
  return static_cast<const CountedMemory*>(memory.get_context())->of == MemoryClass::kCommunication;
}

}  // namespace megashard
