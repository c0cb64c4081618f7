#include "tests/support/default_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <dlfcn.h>
#include <link.h>
#include <torch/library.h>
#include <unwind.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace megashard::testing {
namespace {

c10::DeviceType default_type = c10::kCPU;
thread_local int made_on_the_host = 0;  // number of live MadeOnTheHost objects

enum class Origin { kLibrary, kLibTorch, kHostOnly, kTest, kProduct };

/// The code that an address belongs to. kHostOnly: functions of LibTorch that write the new tensor's elements on the
/// host.
Origin origin_of(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return Origin::kLibrary;
  const char* slash = std::strrchr(info.dli_fname, '/');
  const char* file = slash == nullptr ? info.dli_fname : slash + 1;
  const char* symbol = info.dli_sname == nullptr ? "" : info.dli_sname;
  const char* values = "_ZN2at6tensorEN3c108ArrayRef";  // at::tensor(values)
  if (std::strncmp(symbol, values, std::strlen(values)) == 0) return Origin::kHostOnly;
  // Inline functions of LibTorch, which the product calls, too: their caller decides.
  for (const char* inlined : {"_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "_ZNK3c10"}) {
    if (std::strncmp(symbol, inlined, std::strlen(inlined)) == 0 && std::strncmp(file, "libtorch", 8) != 0)
      return Origin::kLibrary;
  }
  if (std::strncmp(file, "libmegashard", 12) == 0) return Origin::kProduct;
  if (std::strncmp(file, "libtorch", 8) == 0) return Origin::kLibTorch;
  return std::strstr(file, "_tests") != nullptr ? Origin::kTest : Origin::kLibrary;
}

struct Walk {
  bool past_dispatcher = false;  // the first frames are this file's, then the dispatcher's
  Origin origin = Origin::kLibrary;
};

_Unwind_Reason_Code visit(_Unwind_Context* context, void* argument) {
  static std::mutex mutex;
  static auto* origins = new std::unordered_map<void*, Origin>;
  auto* walk = static_cast<Walk*>(argument);
  auto* address = reinterpret_cast<void*>(_Unwind_GetIP(context));
  const std::lock_guard lock(mutex);
  const auto [at, added] = origins->try_emplace(address);
  if (added) at->second = origin_of(address);
  const bool passes = at->second == Origin::kLibrary || at->second == Origin::kLibTorch;
  walk->past_dispatcher |= at->second == Origin::kLibTorch;
  if (!walk->past_dispatcher || passes) return _URC_NO_REASON;
  walk->origin = at->second;
  return _URC_END_OF_STACK;
}

[[gnu::noinline]] bool asked_by_a_test() {
  Walk walk;
  _Unwind_Backtrace(&visit, &walk);
  return walk.origin == Origin::kTest;
}

std::optional<at::Device> device_for(std::optional<at::Device> device, std::optional<bool> pinned) {
  if (device || pinned.value_or(false) || made_on_the_host > 0 || !asked_by_a_test()) return device;
  return at::Device(default_type);
}

c10::DispatchKeySet keys_of(std::optional<at::Device> device) {
  const auto type = device ? device->type() : c10::kCPU;
  return c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type)));
}

at::Tensor empty_by_default(c10::DispatchKeySet, c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout> layout, std::optional<at::Device> device,
                            std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  device = device_for(device, pinned);
  const auto keys = pinned.value_or(false) ? c10::DispatchKeySet(c10::DispatchKey::CPU) : keys_of(device);
  return at::_ops::empty_memory_format::redispatch(keys, sizes, dtype, layout, device, pinned, format);
}

at::Tensor empty_strided_by_default(c10::DispatchKeySet, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                                    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                    std::optional<at::Device> device, std::optional<bool> pinned) {
  device = device_for(device, pinned);
  const auto keys = pinned.value_or(false) ? c10::DispatchKeySet(c10::DispatchKey::CPU) : keys_of(device);
  return at::_ops::empty_strided::redispatch(keys, sizes, strides, dtype, layout, device, pinned);
}

}  // namespace

void set_default_device_of_tests(c10::DeviceType type) {
  default_type = type;
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  library->impl("empty.memory_format", torch::CppFunction::makeFromUnboxedFunction(&empty_by_default));
  library->impl("empty_strided", torch::CppFunction::makeFromUnboxedFunction(&empty_strided_by_default));
}

MadeOnTheHost::MadeOnTheHost() { ++made_on_the_host; }
MadeOnTheHost::~MadeOnTheHost() { --made_on_the_host; }

}  // namespace megashard::testing
