#pragma once

#include <cstdint>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Resident bytes of a CPU training besides its tensors: program and libraries, arguments, data indices, threads, MKL
/// buffers. Measured in this process while it trains a network of less than 1 MiB. Collective.
int64_t program_memory(const ProcessGroupPtr& group);

}  // namespace megashard
