#include "parallel/sharded_tensor.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "parallel/collectives/device_mesh.h"

namespace megashard {

ShardedTensor ShardedTensor::replicated(at::Tensor whole) {
  ShardedTensor tensor;
  tensor.global_sizes = whole.sizes().vec();
  tensor.offsets.assign(static_cast<size_t>(whole.dim()), 0);
  tensor.local = std::move(whole);
  return tensor;
}

at::Tensor narrowed(at::Tensor tensor, at::IntArrayRef offsets, at::IntArrayRef sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto dim = static_cast<int64_t>(i);
    if (sizes[i] != tensor.size(dim)) tensor = tensor.narrow(dim, sizes[i] == 0 ? 0 : offsets[i], sizes[i]);
  }
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
  narrowed(whole, piece.offsets, piece.local.sizes()).copy_(piece.local.detach());
  for (const auto& group : groups) group->all_reduce(whole, ReduceOp::kSum).wait();  // the others have zeros there
  return whole;
}

}  // namespace megashard
