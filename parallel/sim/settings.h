#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel/device/device_plan.h"

namespace megashard::sim {

/// What can be chosen about the simulated device; see docs/simulated_device.md.
struct Settings {
  size_t capacity = size_t{139} << 30;  ///< bytes of a device, as cudaMalloc would give them
  uint64_t shuffle_seed = 0;            ///< not 0: what was enqueued runs a second time, in a random legal order
  bool stacks = false;                  ///< findings show where both operations were called
  bool expandable_segments = false;
  bool shapes = false;  ///< operators have sizes and times, and no values; no memory is touched
  DeviceModel model{};  ///< of `shapes`
};

/// Of the environment variable MEGASHARD_SIM
/// ("capacity_mib=512,shuffle=3,stacks,expandable_segments"), read at the first call. May be
/// changed while nothing is enqueued.
Settings& settings();

}  // namespace megashard::sim
