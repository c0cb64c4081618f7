#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace megashard {

/// What a forward depends on beside its arguments and parameters: generators and thread state
/// (autocast and its dtypes). Taken before the first run, and in force while a Replayed lives.
class CallState {
 public:
  /// With rng: the default CPU generator, those of the inputs' devices, and `generators`.
  CallState(const std::vector<at::Tensor>& inputs, bool rng, const std::vector<at::Generator>& generators);

  /// Puts the state in force on this thread, with grad mode on; what was there before comes back at
  /// the end.
  class Replayed {
   public:
    explicit Replayed(const CallState& state);
    ~Replayed();
    Replayed(const Replayed&) = delete;
    Replayed& operator=(const Replayed&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    at::ThreadLocalStateGuard thread_state_;
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  at::ThreadLocalState thread_state_;
};

}  // namespace megashard
