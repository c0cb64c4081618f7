#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/collectives/chunk_range.h"

namespace megashard {

class DeviceMesh;
class ProcessGroup;

/// Placement of a tensor on one mesh dimension (torch.distributed.tensor.placement_types). If several leading
/// dimensions are sharded as one, kShard names dimension 0; offsets and sizes give the shard's extent.
struct Placement {
  enum class Kind {
    kReplicate,
    kShard,
    kStridedShard,  ///< `dim` is first split into split_factor pieces over a later mesh dimension
  };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;
  int64_t split_factor = 1;

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {Kind::kShard, dim, 1}; }
  static Placement strided_shard(int64_t dim, int64_t split_factor) { return {Kind::kStridedShard, dim, split_factor}; }
  bool operator==(const Placement&) const = default;
};

/// This rank's shard of a tensor and its place in the whole tensor; enough for a checkpoint. `local` may have 0 rows.
/// It aliases the live storage: copying into it updates the model or optimizer.
struct ShardedTensor {
  at::Tensor local;
  std::vector<int64_t> global_sizes;
  std::vector<int64_t> offsets;            // of `local` in the whole tensor; one per dimension
  std::shared_ptr<const DeviceMesh> mesh;  // null: every rank holds the whole tensor
  std::vector<Placement> placements;       // one per mesh dimension

  static ShardedTensor replicated(at::Tensor whole);
  bool is_replicated() const { return mesh == nullptr; }
};

/// View of the box of a tensor that begins at these offsets; an empty box may begin beyond the tensor.
at::Tensor narrowed(at::Tensor tensor, at::IntArrayRef offsets, at::IntArrayRef sizes);

/// Groups of more than one rank over which a tensor is sharded, one per mesh dimension that shards it.
std::vector<std::shared_ptr<ProcessGroup>> sharding_groups(const ShardedTensor& tensor);

/// The whole tensor (DTensor.full_tensor), or the piece itself if it is not sharded. Collective over the sharding
/// ranks, one all-reduce per mesh dimension that shards it: for small tensors.
at::Tensor full_tensor(const ShardedTensor& piece);

/// Tensors by fully qualified name, in insertion order.
using ShardedTensors = std::vector<std::pair<std::string, ShardedTensor>>;

}  // namespace megashard
