#pragma once

#include "parallel/collectives/process_group.h"
#include "parallel/device/cuda_module.h"

namespace megashard::sim {

/// One rank of a group without the other ranks: a collective is an operation on the current stream that takes its time
/// on settings().model and moves nothing. For shapes without memory.
ProcessGroupPtr make_shape_group(const NcclGroupOptions& options);

}  // namespace megashard::sim
