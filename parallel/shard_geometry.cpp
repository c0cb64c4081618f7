#include "parallel/shard_geometry.h"

#include <c10/util/accumulate.h>

namespace megashard {

ShardGeometry::ShardGeometry(std::vector<int64_t> whole, int64_t cut, int parts)
    : sizes(std::move(whole)), dim(cut), ranks(parts), numel(c10::multiply_integers(sizes)) {
  for (int64_t i = 0; i < dim && numel > 0; ++i) runs *= sizes[i];
  chunk_numel = c10::multiply_integers(local_sizes(0));
}

std::vector<int64_t> ShardGeometry::local_sizes(int rank) const {
  auto local = sizes;
  local[dim] = range(rank).size;
  return local;
}

}  // namespace megashard
