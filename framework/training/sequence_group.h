#pragma once

#include "framework/arguments/arguments.h"
#include "framework/modules/multi_modal_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// The --context-parallel-size ranks of `group` that share this one's sequences: neighbours, so
/// that their exchanges stay within a node. Null: it has them alone. Throws where the model cannot
/// share a sequence among so many. Collective.
ProcessGroupPtr sequence_group(const Arguments& arguments, const MultiModalModule& model, const ProcessGroupPtr& group);

/// The ranks that read the same rows of different sequences: of each sequence group one. `group`
/// itself where sequences are not shared. Collective.
ProcessGroupPtr data_parallel_group(const Arguments& arguments, const ProcessGroupPtr& group);

/// What this rank's forward takes of a batch with whole sequences on the host (`sequence` set):
/// prepared, on `device`, with this rank's rows. The attention mask stays whole.
Batch batch_of_rank(const MultiModalModule& model, Batch whole, c10::Device device);

}  // namespace megashard
