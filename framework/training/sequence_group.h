#pragma once

#include "framework/arguments/arguments.h"
#include "framework/modules/multi_modal_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// How the --context-parallel-size ranks of `group` that share this one's sequences do it, neighbours
/// among themselves, so that their exchanges stay within a node; the length is that of no sequence yet. One
/// rank shares with none. Throws where the model cannot share a sequence so. Collective.
SequenceShard sequence_ranks(const Arguments& arguments, const MultiModalModule& model, const ProcessGroupPtr& group);

/// The ranks that read the same rows of different sequences: of each sequence group one. `group`
/// itself where sequences are not shared. Collective.
ProcessGroupPtr data_parallel_group(const Arguments& arguments, const ProcessGroupPtr& group);

}  // namespace megashard
