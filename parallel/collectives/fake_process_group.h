#pragma once

#include <c10/core/Device.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

struct FakeGroupOptions {
  int rank = 0;
  int world_size = 1;
  c10::DeviceType device_type = c10::kCPU;
};

/// One rank of a world in which all other ranks hold the same data: collectives complete at once on any device (also
/// meta), with that world's results. An all-gather repeats this rank's slice, a sum multiplies by the size, a broadcast
/// does nothing. For plans of large worlds and for measuring host overhead.
ProcessGroupPtr make_fake_group(const FakeGroupOptions& options);

}  // namespace megashard
