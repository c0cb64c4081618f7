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

/// How one mesh dimension holds a tensor (torch.distributed.tensor.placement_types). Of a tensor
/// whose leading dimensions are cut as one, kShard names dimension 0; offsets and sizes say how far
/// the cut goes.
struct Placement {
  enum class Kind {
    kReplicate,
    kShard,
    kStridedShard,  ///< `dim` is first cut into split_factor pieces over a later mesh dimension
  };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;
  int64_t split_factor = 1;

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {Kind::kShard, dim, 1}; }
  static Placement strided_shard(int64_t dim, int64_t split_factor) { return {Kind::kStridedShard, dim, split_factor}; }
  bool operator==(const Placement&) const = default;
};

/// The piece of a tensor that this rank holds, and where it lies in the whole: all that a
/// checkpoint needs. `local` may have 0 rows; it aliases the live storage, so copying into it
/// updates the model or optimizer.
struct ShardedTensor {
  at::Tensor local;
  std::vector<int64_t> global_sizes;
  std::vector<int64_t> offsets;            // of `local` in the whole; one per dimension
  std::shared_ptr<const DeviceMesh> mesh;  // null: every rank holds the whole tensor
  std::vector<Placement> placements;       // one per mesh dimension

  static ShardedTensor replicated(at::Tensor whole);
  bool is_replicated() const { return mesh == nullptr; }
};

/// The groups of more than one rank over which a tensor is cut, one per mesh dimension that cuts
/// it.
std::vector<std::shared_ptr<ProcessGroup>> sharding_groups(const ShardedTensor& tensor);

/// The whole of a matrix that is cut along dimension 0, on every rank that shares it; without such ranks the piece
/// itself (DTensor.full_tensor). Collective over them; throws for another cut.
at::Tensor full_tensor(const ShardedTensor& piece);

/// Ordered by first insertion; keys are fully qualified names.
using ShardedTensors = std::vector<std::pair<std::string, ShardedTensor>>;

}  // namespace megashard
