#pragma once

#include <string>

#include "checkpoint/hugging_face/hf_files.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A model's weights in the names and forms of its files, and how they are written.
struct HfWeights {
  ShardedTensors tensors;
  HfSaveOptions files;
};

/// As save_hf_weights, by all ranks of `group` (null: this process alone) into a shared folder, like torch's
/// HuggingFaceStorageWriter with consolidation, but in one pass. Each rank passes its shards by their names in the
/// model, in any order. Headers and offsets follow from the sizes, so every rank writes its rows directly to the final
/// files. Data on several ranks is written by the rank with the least to write. Copies one shard at a time to the host.
/// A failure on one rank throws on all. Until all files are synced, an earlier save is unchanged; after that the folder
/// is the new model, or refused by readers until the next save (HfFolderWriter), never a mixture. Calls
/// `options.beside` on the first rank only.
void save_hf_sharded(const std::string& directory, const ShardedTensors& tensors, const ProcessGroupPtr& group,
                     const HfSaveOptions& options = {});

}  // namespace megashard
