#pragma once

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/device/cuda_module.h"

namespace megashard::sim {

/// NCCL's collectives between simulated devices, moved by a Gloo group of the same ranks and so
/// added in rank order. A collective is an operation on the current stream. All ranks' calls are
/// compared: another operation, size, dtype or order is told on every rank, as is, at the deadline,
/// what each rank waits for; on GPUs these hang, or give wrong numbers.
ProcessGroupPtr make_process_group(const NcclGroupOptions& options);

}  // namespace megashard::sim
