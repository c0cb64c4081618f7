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

/// Naming of tensors in .metadata.
struct DcpNaming {
  TiedKeys tied{};          ///< additional keys under which PyTorch finds a tensor that is stored once
  bool bare_names = false;  ///< weights at top level ("lm_head.weight"), as in dcp.save(model.state_dict())
};

/// Saves tensors and plain values into an existing folder as torch.distributed.checkpoint does: __{rank}_0.distcp from
/// every rank, then .metadata from rank 0. Collective over `group` (null: this process alone). Values are nested; ranks
/// may pass different ones. Values that several ranks pass under one key must be equal and are written once. Files are
/// synced on return. A failure on one rank throws on all and leaves no .metadata. Returns all written files on rank 0.
/// `plans`, one per rank, avoids the exchange and merge of plans while nothing has changed.
std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors, const Dict& values,
                                  const ProcessGroupPtr& group, SavePlanCache* plans = nullptr,
                                  const DcpNaming& naming = {});
/// As above, for values that already have keys of their own.
std::vector<WrittenFile> save_dcp(const std::string& folder, const ShardedTensors& tensors,
                                  const std::vector<FlatValue>& values, const ProcessGroupPtr& group,
                                  SavePlanCache* plans = nullptr, const DcpNaming& naming = {});

}  // namespace megashard
