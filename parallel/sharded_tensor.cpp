#include "parallel/sharded_tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

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
  TORCH_CHECK(groups.size() == 1 && piece.offsets[1] == 0 && piece.local.size(1) == piece.global_sizes[1],
              "a matrix of sizes ", piece.global_sizes,
              " is cut along another dimension than 0: its rows cannot be gathered");
  const int64_t ranks = groups[0]->size(), rows = piece.global_sizes[0];
  const int64_t each = (rows + ranks - 1) / ranks;
  const auto mine = at::zeros({each, piece.global_sizes[1]}, piece.local.options().requires_grad(false));
  mine.narrow(0, 0, piece.local.size(0)).copy_(piece.local.detach());
  const auto all = at::empty({ranks * each, piece.global_sizes[1]}, mine.options());
  groups[0]->all_gather_into(all.view({-1}), mine.view({-1})).wait();
  return all.narrow(0, 0, rows);
}

}  // namespace megashard
