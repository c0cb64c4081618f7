#pragma once

#include <cstdint>
#include <string>

#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

/// save_hf_weights by all ranks of `group` (null: this process alone) together, into a folder that
/// all of them see: what torch's HuggingFaceStorageWriter does with consolidation, in one pass.
/// Each rank gives the shards that it holds, by their names in the model, in any order. Headers and
/// places follow from the sizes, so every rank writes its rows straight into the final files; what
/// several ranks hold is written by the one with the least to write. One shard at a time is copied
/// to the host. Files get their names when all of them are on the disk; then comes the index. A
/// failure on one rank is an error on all, and leaves earlier weights alone.
void save_hf_sharded(const std::string& directory, const ShardedTensors& tensors,
                     const ProcessGroupPtr& group,
                     int64_t most_shard_bytes = int64_t{5} * 1000 * 1000 * 1000);

}  // namespace megashard
