#pragma once

#include <cstdint>
#include <memory>

#include "framework/arguments/activation_plan.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

struct ActivationOffloadOptions {
  int64_t min_elements = kMinOffloadedElements;  ///< saved tensors with fewer elements stay
};

/// Offloads the tensors that autograd saves in some modules' forward to host memory until backward
/// (torch.autograd.graph.save_on_cpu; Megatron's --cpu-offloading-num-layers). A storage is copied whole and once,
/// however many views of it are saved. Parameters, buffers and gathered parameters are not copied.
/// CUDA: uses pinned memory and one stream per direction. Does not block the host. A module's memory is free after the
/// next module has run; backward prefetches a module's tensors while the next one computes. On a CPU the copies are
/// real too, so it costs memory instead of saving it.
class ActivationOffload {
 public:
  explicit ActivationOffload(const ActivationOffloadOptions& options = {});
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  /// Enables offload for this module's forward. It encloses the module's recompute, if any: then the inputs are
  /// offloaded. Of nested modules the innermost is used. All modules of a model share one object, which tracks their
  /// order and need not outlive this call.
  void add(HookedModule& module);

  struct Traffic {
    int64_t out_bytes = 0;   ///< copied to the host so far
    int64_t back_bytes = 0;  ///< copied back so far
    int64_t host_bytes = 0;  ///< on the host now
  };
  Traffic traffic() const;

 private:
  class State;
  class Runner;
  std::shared_ptr<State> state_;
};

}  // namespace megashard
