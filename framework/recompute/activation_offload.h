#pragma once

#include <cstdint>
#include <memory>

#include "framework/arguments/activation_arguments.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

struct ActivationOffloadOptions {
  int64_t min_elements = kMinOffloadedElements;  ///< saved tensors of fewer stay
};

/// Keeps what autograd saves in the forward of some modules in host memory until backward
/// (torch.autograd.graph.save_on_cpu; Megatron's --cpu-offloading-num-layers). A storage travels
/// whole and once, however many views of it are saved. Parameters, buffers and gathered parameters
/// never travel.
/// CUDA: pinned memory, a stream for each direction; the host waits for nothing. A module's memory
/// is free when the next one has run, and backward brings a module's tensors back while the one
/// after it computes. On a CPU the copies are real too, so it costs memory there instead of saving
/// it.
class ActivationOffload {
 public:
  explicit ActivationOffload(const ActivationOffloadOptions& options = {});
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  /// From now on this module's forward. Around its recompute, if it has one: then the inputs
  /// travel. Nested modules: the innermost one's forward counts. All modules of a model share one
  /// object, which knows their order and need not outlive this call.
  void add(HookedModule& module);

  struct Traffic {
    int64_t out_bytes = 0;   ///< copied to the host so far
    int64_t back_bytes = 0;  ///< and back
    int64_t host_bytes = 0;  ///< there now
  };
  Traffic traffic() const;

 private:
  class State;
  class Runner;
  std::shared_ptr<State> state_;
};

}  // namespace megashard
