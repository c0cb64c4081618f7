#include "models/kernels/gather_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

at::Tensor gather_rows(const ShardedTensor& piece) {
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
