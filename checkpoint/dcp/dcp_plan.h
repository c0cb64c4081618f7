#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/value_paths.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// What one rank could write: a shard of a tensor, or a plain value.
struct WriteItem {
  std::string key;
  std::vector<Value> path;
  bool is_tensor = false;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> global_sizes{};
  std::vector<int64_t> offsets{};
  std::vector<int64_t> sizes{};
  bool is_unsharded = false;  ///< no sharding keeps it equal on the ranks that have it: buffers

  int64_t bytes() const;  ///< of its data; 1 for plain values
  bool operator==(const WriteItem&) const = default;
};

using RankPlan = std::vector<WriteItem>;

/// Values first, then tensors, in the order given.
RankPlan make_rank_plan(const ShardedTensors& tensors, const std::vector<FlatValue>& values);
// As ranks tell each other.
Value plan_value(const RankPlan& plan);
RankPlan plan_of(const Value& value);

/// Who writes what, the same on every rank.
struct SavePlan {
  struct Write {
    size_t item;   ///< in the rank's own plan
    size_t entry;  ///< in the metadata
    size_t chunk;  ///< of that entry, if it is a tensor
  };
  std::vector<std::vector<Write>> writes;  ///< one list a rank
  DcpMetadata metadata;                    ///< complete but for the locations
};

/// Throws when the chunks of a tensor do not tile it: inside it, apart from each other, and its
/// volume in all. As many steps as sorting takes, for shards of shards; of boxes in another order,
/// which are compared pair by pair, it refuses too many.
void check_tiling(const std::string& key, const DcpTensor& tensor);

/// The plan of the last save, kept for the next one (torch's enable_plan_caching): it is the same
/// while every rank has the same items as before.
struct SavePlanCache {
  RankPlan mine;
  std::shared_ptr<const SavePlan> plan;
  bool told_of_copies = false;  ///< ranks that hold different copies were told of once
};

/// Merges the ranks' plans: what several ranks hold (replicas, values, empty shards) is written
/// once, by the one with the least to write; what is_unsharded by the first rank that has it, so that
/// tensors that differ between ranks (a BatchNorm's mean and variance) are all of one. Throws when
/// ranks disagree on a tensor, or its chunks do not cover it exactly.
SavePlan make_save_plan(const std::vector<RankPlan>& plans);

}  // namespace megashard
