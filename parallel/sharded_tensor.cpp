#include "parallel/sharded_tensor.h"

#include "parallel/collectives/device_mesh.h"

namespace megashard {

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
