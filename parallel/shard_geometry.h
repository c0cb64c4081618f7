#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "parallel/sharded_tensor.h"

namespace megashard {

/// How a contiguous tensor is cut along one dimension over ranks, by torch.chunk's rule. A rank's
/// chunk is contiguous too; in the whole it lies as `runs` equal runs, one for each index of the
/// dimensions before the cut.
struct ShardGeometry {
  std::vector<int64_t> sizes;  // of the whole
  int64_t dim = 0;
  int ranks = 1;
  int64_t numel = 0;        // of the whole
  int64_t runs = 1;         // 1 for dimension 0
  int64_t chunk_numel = 0;  // of the first rank's chunk: the padded local size

  ShardGeometry() = default;
  ShardGeometry(std::vector<int64_t> whole, int64_t cut, int parts);

  ChunkRange range(int rank) const { return chunk_range(sizes[dim], ranks, rank); }
  std::vector<int64_t> local_sizes(int rank) const;
  bool even() const { return chunk_numel * ranks == numel; }
};

}  // namespace megashard
