#pragma once

#include <c10/core/Device.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

struct FakeGroupOptions {
  int rank = 0;
  int world_size = 1;
  c10::DeviceType device_type = c10::kCPU;
};

/// A rank of a world in which every other rank holds what this one holds: collectives complete at
/// once, on any device (meta too), and are what that world would see. An all-gather repeats the own
/// slice, a sum multiplies by the size, a broadcast changes nothing. For plans of large worlds and
/// for measuring the cost of the host.
ProcessGroupPtr make_fake_group(const FakeGroupOptions& options);

}  // namespace megashard
