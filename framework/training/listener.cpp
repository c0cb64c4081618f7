#include "framework/training/listener.h"

#include <string_view>

namespace megashard {
namespace {

int64_t ignored = 0;

bool is_own(const CallbackStamp& stamp) {
  const CallbackStamp own;
  return stamp.version == own.version && std::string_view(stamp.libtorch) == own.libtorch &&
         stamp.report_bytes == own.report_bytes && stamp.run_bytes == own.run_bytes;
}

}  // namespace

int64_t ignored_callbacks() { return ignored; }

RegisterCallback::RegisterCallback(const CallbackKind& kind, const CallbackStamp& stamp) {
  if (is_own(stamp)) {
    add_callback(kind);
  } else {
    ++ignored;  // `kind` may have another layout
  }
}

}  // namespace megashard
