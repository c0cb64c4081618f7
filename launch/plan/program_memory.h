#pragma once

#include <cstdint>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Bytes that a training on a CPU has resident besides its tensors: the program and its libraries, arguments, indexes
/// of data, threads, buffers of MKL. Looks at this process while it trains a network of less than 1 MiB. Collective.
int64_t program_memory(const ProcessGroupPtr& group);

}  // namespace megashard
