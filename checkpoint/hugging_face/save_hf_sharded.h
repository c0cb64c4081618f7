#pragma once

#include <string>

#include "checkpoint/hugging_face/hf_files.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// save_hf_weights by all ranks of `group` (null: this process alone) together, into a folder that
/// all of them see: what torch's HuggingFaceStorageWriter does with consolidation, in one pass.
/// Each rank gives the shards that it holds, by their names in the model, in any order. Headers and
/// places follow from the sizes, so every rank writes its rows straight into the final files; what
/// several ranks hold is written by the one with the least to write. One shard at a time is copied
/// to the host. A failure on one rank is an error on all. Until all files are on the disk it leaves
/// an earlier save as it was; after that the folder is the new model, or refused by readers until
/// it is saved again (HfFolderWriter), never a mixture. `options.beside` is called on the first
/// rank alone.
void save_hf_sharded(const std::string& directory, const ShardedTensors& tensors, const ProcessGroupPtr& group,
                     const HfSaveOptions& options = {});

}  // namespace megashard
