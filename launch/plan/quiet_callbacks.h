#pragma once

#include <chrono>
#include <functional>
#include <utility>

#include "framework/training/trainer.h"

namespace megashard {

/// Callbacks of a training without output.
inline TrainerCallbacks quiet_callbacks(std::function<void()> after_step) {
  const auto no_line = [](const std::string&) {};
  TrainerCallbacks callbacks;
  callbacks.print_on_first_rank = callbacks.print_on_last_rank = no_line;
  callbacks.stop_request = [] { return StopRequest::kNone; };
  callbacks.peak_memory_bytes = callbacks.live_memory_bytes = [] { return int64_t{0}; };
  callbacks.after_step = std::move(after_step);
  callbacks.program_start = std::chrono::steady_clock::now();
  return callbacks;
}

}  // namespace megashard
