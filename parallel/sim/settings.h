#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel/device/device_plan.h"

namespace megashard::sim {

/// Options of the simulated device; see docs/simulated_device.md.
struct Settings {
  size_t capacity = size_t{139} << 30;  ///< bytes per device, as for cudaMalloc
  uint64_t shuffle_seed = 0;            ///< if not 0: runs enqueued work again in a random legal order
  bool stacks = false;                  ///< findings show the call stacks of both operations
  bool expandable_segments = false;
  bool shapes = false;  ///< operators have sizes and times but no values or memory
  DeviceModel model{};  ///< for `shapes`
};

/// Read from the environment variable MEGASHARD_SIM ("capacity_mib=512,shuffle=3,stacks,expandable_segments") on the
/// first call. May change while nothing is enqueued.
Settings& settings();

}  // namespace megashard::sim
