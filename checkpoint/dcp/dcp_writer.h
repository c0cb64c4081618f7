#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/tied_keys.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/value.h"
#include "checkpoint/values/value_paths.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Chooses the keys of tensors in .metadata.
struct DcpNaming {
  TiedKeys tied{};          ///< further keys: PyTorch finds a tensor under each, and it is written once
  bool bare_names = false;  ///< weights at the top, "lm_head.weight", as PyTorch's dcp.save(model.state_dict()) does
};

/// Saves tensors and plain values into an existing folder as torch.distributed.checkpoint does:
/// __{rank}_0.distcp from every rank, then .metadata from rank 0. Collective over `group` (null:
/// this process alone). Values are nested; each rank may give others: what several ranks give under
/// one key must be equal, and is written once. Files are on the disk on return. A failure on one
/// rank is an error on all, and leaves no .metadata. Returns on rank 0 all files that were written.
/// `plans`, one a rank, saves the exchange and the merging of plans while nothing has changed.
std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                  const ProcessGroupPtr& group, SavePlanCache* plans = nullptr,
                                  const DcpNaming& naming = {});
/// The same with values under keys of their own, each stored as it is.
std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors,
                                  const std::vector<FlatValue>& values, const ProcessGroupPtr& group,
                                  SavePlanCache* plans = nullptr, const DcpNaming& naming = {});

}  // namespace megashard
