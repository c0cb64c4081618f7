#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace megashard {

/// The generator's state as a byte tensor, read under its lock.
at::Tensor generator_state(const at::Generator& generator);
void set_generator_state(at::Generator& generator, const at::Tensor& state);
bool same_generator_state(const at::Tensor& a, const at::Tensor& b);

/// State that a forward depends on besides arguments and parameters: generators and thread state (autocast and its
/// dtypes). Captured before the first run and restored during a Replayed.
class CallState {
 public:
  /// With rng: the default CPU generator, those of the inputs' devices, and `generators`.
  CallState(const std::vector<at::Tensor>& inputs, bool rng, const std::vector<at::Generator>& generators);

  /// Restores the state on this thread, with grad mode on, until it is destroyed.
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
