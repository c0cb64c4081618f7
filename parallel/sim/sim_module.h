#pragma once

#include <cstdint>

#include "parallel/sim/settings.h"

namespace megashard::sim {

struct Counts {
  int64_t operations;        ///< checked, on all devices
  int64_t collectives;       ///< part of operations
  int64_t collective_bytes;  ///< of each collective's larger tensor
  int64_t shuffled_windows;  ///< run twice, in a random order
  int64_t pinned_bytes;      ///< in use
};

/// Test interface of the simulated device, besides the CudaModule for the product.
struct SimModule {
  Settings& (*settings)();
  Counts (*counts)();
  /// Captures work that `work` enqueues on the current stream; throws CUDA's errors.
  void* (*capture_graph)(void (*work)(void*), void* argument);
  void (*replay_graph)(void* graph);
  void (*free_graph)(void* graph);
};

}  // namespace megashard::sim
