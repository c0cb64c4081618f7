#include "parallel/sim/operation.h"

#include <ATen/record_function.h>

#include <vector>

#include "parallel/sim/findings.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/operation_costs.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/shape_operators.h"
#include "parallel/sim/shuffled_run.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

std::string stream_text(int agent) {
  if (agent == kHost) return "the host";
  return agent == 1 ? "the default stream" : "stream " + std::to_string(agent - 1);
}

}  // namespace

Operation::Operation(SimDevice& device, const std::string& name)
    : lock_(device.mutex), device_(device), stream_(current_stream(device.index)) {
  begin_shuffled_window(device_);
  const int agent = agent_of(stream_);
  access_.agent = agent;
  access_.time = device_.enqueue(agent);
  access_.operation = interned(name);
  if (settings().stacks) access_.stack = interned(call_stack());
  capture_of(device_).on_operation(stream_, name);
  ++device_.operations;
  device_.running = access_.operation;
}

Operation::~Operation() {
  end();
  device_.running = nullptr;
}

void Operation::end() {
  const auto [bytes, seconds] = std::exchange(collective_, {});
  if (bytes > 0) ++device_.collectives;
  device_.collective_bytes += bytes;
  if (!settings().shapes) return;
  if (bytes == 0 && moved_ == 0) return;  // a view, or already ended
  const double takes = bytes > 0 ? seconds : kernel_seconds(*access_.operation, arithmetic_, moved_, is_narrow_);
  device_.timeline.run(access_.agent, {access_.operation, takes, bytes}, current_unit());
  moved_ = 0;
}

void Operation::touch(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  if (settings().shapes) {
    moved_ += bytes_of_elements(tensor);
    return;
  }
  const std::string* name = name_of_memory(tensor);
  over_runs(tensor, [&](const void* begin, size_t bytes) { touch(begin, bytes, writes, name); });
}

void Operation::touch(const void* begin, size_t bytes, bool writes, const std::string* name) {
  if (bytes == 0 || begin == nullptr) return;
  if (settings().shapes) {
    moved_ += static_cast<int64_t>(bytes);
    return;
  }
  const int region = Arena::get().region_of(begin);
  if (region < 0) return;
  if (region == Arena::kPinned)
    PinnedMemory::get().close(device_.index, begin, bytes, writes, access_.agent, access_.time, *access_.operation);
  access_.name = name;
  if (device_.recording.on() && region != Arena::kPinned) after_.push_back(device_.pools.handed_out(begin));
  capture_of(device_).on_use(begin, bytes, writes);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const auto tell = [&](const Access& earlier, bool earlier_wrote) { report(earlier, earlier_wrote, writes, name); };
  const VectorClock& seen = device_.seen_by(access_.agent);
  writes ? device_.log.write(address, bytes, access_, seen, tell)
         : device_.log.read(address, bytes, access_, seen, tell);
}

void Operation::report(const Access& earlier, bool earlier_wrote, bool writes, const std::string* name) {
  const auto of = [](const std::string* memory) { return memory == nullptr ? "" : " " + *memory; };
  std::string text = earlier.of_earlier_owner ? "memory was handed out again too early: " : "race: ";
  text += *access_.operation + " on " + stream_text(access_.agent) + (writes ? " writes" : " reads") + of(name) +
          ", and no event orders it after " + *earlier.operation + " on " + stream_text(earlier.agent) + ", which " +
          (earlier_wrote ? "wrote" : "read") + (earlier.of_earlier_owner ? of(earlier.name) + " there" : " it") +
          " (simulated GPU " + std::to_string(device_.index) + ")";
  if (access_.stack != nullptr) text += "\n  now called by" + *access_.stack;
  if (earlier.stack != nullptr) text += "\n  earlier called by" + *earlier.stack;
  found(text);
}

void Operation::run(std::function<void()> work) {
  if (settings().shapes) return;
  work();
  recorded(std::move(work));
}

void Operation::recorded(std::function<void()> work) {
  device_.recording.add(access_.agent, *access_.operation, after_, std::move(work));
}

namespace {

thread_local std::vector<std::string> scopes;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  scopes.emplace_back(function.name());
  return nullptr;
}
void on_end(const at::RecordFunction&, at::ObserverContext*) {
  if (!scopes.empty()) scopes.pop_back();
}

}  // namespace

void watch_unit_scopes() {
  at::addGlobalCallback(at::RecordFunctionCallback(&on_start, &on_end).scopes({at::RecordScope::USER_SCOPE}));
}

const std::string& current_unit() {
  static const std::string none;
  return scopes.empty() ? none : scopes.back();
}

}  // namespace megashard::sim
