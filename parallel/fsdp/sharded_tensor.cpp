#include "parallel/fsdp/sharded_tensor.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "parallel/collectives/device_mesh.h"

namespace megashard {

ChunkRange chunk_range(int64_t length, int64_t parts, int64_t index) {
  TORCH_CHECK(length >= 0 && parts > 0 && 0 <= index && index < parts, "chunk_range: piece ", index, " of ", parts,
              " of ", length, " rows does not exist");
  const int64_t piece = (length + parts - 1) / parts;
  const int64_t offset = std::min(index * piece, length);
  return {.offset = offset, .size = std::min(piece, length - offset)};
}

ShardedTensor ShardedTensor::replicated(at::Tensor whole) {
  ShardedTensor tensor;
  tensor.global_sizes = whole.sizes().vec();
  tensor.offsets.assign(static_cast<size_t>(whole.dim()), 0);
  tensor.local = std::move(whole);
  return tensor;
}

std::vector<ProcessGroupPtr> sharding_groups(const ShardedTensor& tensor) {
  std::vector<ProcessGroupPtr> groups;
  for (size_t dim = 0; dim < tensor.placements.size(); ++dim) {
    if (tensor.placements[dim].kind == Placement::Kind::kReplicate) continue;
    const auto& group = tensor.mesh->group(static_cast<int>(dim));
    if (group->size() > 1) groups.push_back(group);
  }
  return groups;
}

}  // namespace megashard
