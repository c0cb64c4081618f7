#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>

#include "framework/callbacks/callbacks.h"
#include "framework/training/listener.h"

namespace megashard {

/// Versions that a callback is compiled against. The program ignores a callback whose stamp differs from its own.
struct CallbackStamp {
  uint32_t version = 1;  ///< changes with Listener and CallbackKind
  const char* libtorch = TORCH_VERSION;
  size_t report_bytes = sizeof(StepReport);
  size_t run_bytes = sizeof(TrainingRun);
};

/// A static object in a callback's file, which is part of the program or a library of --callback-plugin: makes
/// --callback and --help know it. Leave the default stamp.
struct RegisterCallback {
  explicit RegisterCallback(const CallbackKind& kind, const CallbackStamp& stamp = {});
};

/// Number of callbacks that were ignored.
int64_t ignored_callbacks();

}  // namespace megashard
