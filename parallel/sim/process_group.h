#pragma once

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/process_group.h"
#include "parallel/device/cuda_module.h"

namespace megashard::sim {

/// NCCL's collectives between simulated devices, run by a Gloo group of the same ranks (so summed in rank order), as
/// operations on the current stream. Compares all ranks' calls: a different operation, size, dtype or order is reported
/// on every rank; so is, at the deadline, what each rank waits for. On GPUs these hang or give wrong results.
ProcessGroupPtr make_process_group(const NcclGroupOptions& options);

/// One rank of a group without the other ranks: a collective is an operation on the current stream that takes its time
/// on settings().model and moves nothing. For shapes without memory.
ProcessGroupPtr make_shape_group(const NcclGroupOptions& options);

}  // namespace megashard::sim
