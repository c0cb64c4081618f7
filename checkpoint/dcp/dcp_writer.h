#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/value.h"
#include "checkpoint/values/value_paths.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// One item that a rank can write: a shard of a tensor, or a plain value.
struct WriteItem {
  std::string key;
  std::vector<Value> path;
  bool is_tensor = false;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> global_sizes{};
  std::vector<int64_t> offsets{};
  std::vector<int64_t> sizes{};
  bool is_unsharded = false;  ///< not kept equal across ranks by any sharding: buffers

  int64_t bytes() const;  ///< size of its data; 1 for plain values
  bool operator==(const WriteItem&) const = default;
};

using RankPlan = std::vector<WriteItem>;

/// Values first, then tensors, in the given order.
RankPlan make_rank_plan(const ShardedTensors& tensors, const std::vector<FlatValue>& values);
// Serialisation for the exchange between ranks.
Value plan_value(const RankPlan& plan);
RankPlan plan_of(const Value& value);

/// Assignment of items to ranks; identical on all ranks.
struct SavePlan {
  struct Write {
    size_t item;   ///< index in the rank's own plan
    size_t entry;  ///< index in the metadata
    size_t chunk;  ///< index in that entry, for tensors
  };
  std::vector<std::vector<Write>> writes;  ///< one list per rank
  DcpMetadata metadata;                    ///< complete except for the locations
};

/// Throws unless the chunks tile the tensor: inside it, disjoint, and with its volume in total. Takes the time of a
/// sort for nested shards. Boxes in other arrangements are compared pairwise; too many of them are refused.
void check_tiling(const std::string& key, const DcpTensor& tensor);

/// The last save's plan, reused (torch's enable_plan_caching) while every rank has the same items as before.
struct SavePlanCache {
  RankPlan mine;
  std::shared_ptr<const SavePlan> plan;
  bool told_of_copies = false;  ///< differing copies on the ranks have been reported
};

/// Merges the ranks' plans. Items on several ranks (replicas, values, empty shards) are written once, by the rank with
/// the least to write; is_unsharded ones by the first rank that has them, so that tensors that differ between ranks
/// (mean and variance of a BatchNorm) come from one rank. Throws if ranks disagree on a tensor, or if its chunks do not
/// tile it.
SavePlan make_save_plan(const std::vector<RankPlan>& plans);

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
