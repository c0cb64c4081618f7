#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "framework/training/trainer.h"

namespace megashard {

struct AfterStep : Listener {
  explicit AfterStep(std::function<void()> act) : act_(std::move(act)) {}
  void weights_updated(int64_t) override { act_(); }

 private:
  std::function<void()> act_;
};

/// Callbacks of a training without output.
inline TrainerCallbacks quiet_callbacks(std::function<void()> after_step) {
  TrainerCallbacks callbacks;
  callbacks.print_on_first_rank = [](const std::string&) {};
  callbacks.stop_request = [] { return StopRequest::kNone; };
  callbacks.peak_memory_bytes = callbacks.live_memory_bytes = [] { return int64_t{0}; };
  callbacks.listeners = {std::make_shared<AfterStep>(std::move(after_step))};
  callbacks.program_start = std::chrono::steady_clock::now();
  return callbacks;
}

}  // namespace megashard
