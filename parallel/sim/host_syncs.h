#pragma once

#include <vector>

#include "parallel/device/cuda_module.h"

namespace megashard::sim {

/// Counts a wait of the host for a device; `how`: the call that a GPU's driver would see.
void count_host_sync(const char* how);
void log_host_syncs(bool places);
std::vector<HostSync> take_host_syncs();

}  // namespace megashard::sim
