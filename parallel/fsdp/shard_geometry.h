#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

/// How a contiguous tensor is cut over ranks: along one dimension by torch.chunk's rule, or along
/// its leading dimensions as if they were one. A rank's chunk is contiguous too; in the whole it
/// lies as `runs` equal runs, one for each index of the dimensions before the cut.
struct ShardGeometry {
  std::vector<int64_t> sizes;  // of the whole
  int64_t dim = 0;
  int64_t merged = 1;  // leading dimensions that are cut as one; more than 1 only if dim is 0
  int ranks = 1;
  int64_t numel = 0;        // of the whole
  int64_t runs = 1;         // 1 for dimension 0
  int64_t chunk_numel = 0;  // of the first rank's chunk: the padded local size

  ShardGeometry() = default;
  ShardGeometry(std::vector<int64_t> whole, int64_t cut, int parts);
  /// Cut along the first `leading` dimensions. Every chunk is a box of the whole, which is all that
  /// offsets and sizes, and so a checkpoint, can say of it: whole slices of one dimension, or an
  /// equal part of one. None where the sizes do not allow it.
  static std::optional<ShardGeometry> of_leading(std::vector<int64_t> whole, int64_t leading,
                                                 int parts);

  /// The chunk as a box: where it begins and how far it reaches in each dimension.
  std::vector<int64_t> offsets(int rank) const;
  std::vector<int64_t> local_sizes(int rank) const;
  /// Other sizes of the same elements, whose dimension `dim` is what is cut: the leading dimensions
  /// are one there.
  std::vector<int64_t> as_cut(std::vector<int64_t> whole_or_chunk) const;
  bool even() const { return chunk_numel * ranks == numel; }

 private:
  std::vector<int64_t> box_;  // of leading dimensions: what every chunk has of them
};

}  // namespace megashard
