#pragma once

#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// The model's tensors that ranks hold whole and no sharding keeps equal, such as a BatchNorm's running
/// statistics, whose bytes are not the same on all ranks. Collective over `group` (null: this process alone).
std::vector<std::string> differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group);

}  // namespace megashard
