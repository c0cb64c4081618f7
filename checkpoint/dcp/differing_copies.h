#pragma once

#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Names of the model's unsharded tensors, such as running statistics of BatchNorm, whose bytes differ between ranks.
/// Collective over `group` (null: this process alone).
std::vector<std::string> differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group);

}  // namespace megashard
