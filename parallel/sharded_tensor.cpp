#include "parallel/sharded_tensor.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

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

at::Tensor full_tensor(const ShardedTensor& piece) {
  const auto groups = sharding_groups(piece);
  if (groups.empty()) return piece.local.detach();
  const auto whole = at::zeros(piece.global_sizes, piece.local.options().requires_grad(false));
  auto own = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim)
    own = own.narrow(dim, std::min(piece.offsets[static_cast<size_t>(dim)], whole.size(dim) - piece.local.size(dim)),
                     piece.local.size(dim));
  own.copy_(piece.local.detach());
  for (const auto& group : groups) group->all_reduce(whole, ReduceOp::kSum).wait();  // the others have zeros there
  return whole;
}

}  // namespace megashard
