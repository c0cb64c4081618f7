#pragma once

#include <cstdint>

#include "parallel/sim/settings.h"

namespace megashard::sim {

struct Counts {
  int64_t operations;        ///< checked, on all devices
  int64_t collectives;       ///< of these
  int64_t collective_bytes;  ///< of the larger tensor of each
  int64_t shuffled_windows;  ///< run a second time in a random order
  int64_t pinned_bytes;      ///< in use now
};

/// The simulated device as tests use it, beside the CudaModule that the product sees.
struct SimModule {
  Settings& (*settings)();
  Counts (*counts)();
  /// Captures what `work` enqueues on the current stream; throws what CUDA would.
  void* (*capture_graph)(void (*work)(void*), void* argument);
  void (*replay_graph)(void* graph);
  void (*free_graph)(void* graph);
};

}  // namespace megashard::sim
