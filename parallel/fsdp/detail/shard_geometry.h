#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/copies/batched_copy.h"

namespace megashard {

/// Partition of a contiguous tensor over ranks: along one dimension by torch.chunk's rule, or along its leading
/// dimensions merged into one. Each rank's chunk is contiguous; in the whole tensor it is `runs` equal runs, one per
/// index of the dimensions before the sharded one.
struct ShardGeometry {
  std::vector<int64_t> sizes;  // of the whole tensor
  int64_t dim = 0;
  int64_t merged = 1;  // number of leading dimensions sharded as one; more than 1 only if dim is 0
  int ranks = 1;
  int64_t numel = 0;        // of the whole tensor
  int64_t runs = 1;         // 1 for dimension 0
  int64_t chunk_numel = 0;  // elements of the first rank's chunk: the padded local size

  ShardGeometry() = default;
  ShardGeometry(std::vector<int64_t> whole, int64_t cut, int chunks);
  /// Shards along the first `leading` dimensions. Each chunk is a box, as offsets and sizes (and so checkpoints) can
  /// only describe boxes: whole slices of one dimension, or an equal part of one slice. Empty if the sizes do not allow
  /// that.
  static std::optional<ShardGeometry> of_leading(std::vector<int64_t> whole, int64_t leading, int chunks);

  /// Offsets and sizes of a rank's chunk in each dimension.
  std::vector<int64_t> offsets(int rank) const;
  std::vector<int64_t> local_sizes(int rank) const;
  /// Sizes of the same elements with the leading dimensions merged, so that dimension `dim` is the sharded one.
  std::vector<int64_t> as_cut(std::vector<int64_t> whole_or_chunk) const;
  bool even() const { return chunk_numel * ranks == numel; }
  /// True if equal chunks follow one another in the whole tensor, so that they can be sent and received in place.
  bool contiguous_chunks() const { return even() && runs == 1; }

 private:
  std::vector<int64_t> box_;  // for leading dimensions: each chunk's sizes in them
};

/// Chunks of all ranks in one buffer: rank r's chunk starts at r * stride elements.
struct ChunkBuffer {
  void* first = nullptr;  ///< rank 0's chunk
  at::ScalarType dtype = at::kByte;
  int64_t stride = 0;
};

/// Adds copies that split a whole tensor into chunks, each zero-padded to the first one's size (chunk_cat). whole: null
/// for zeros.
void add_chunk_cat(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const void* whole,
                   at::ScalarType dtype, const ChunkBuffer& chunks);
/// Adds copies that assemble the whole tensor from chunks, in the chunks' dtype (split_with_sizes_copy).
void add_copy_out(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const ChunkBuffer& chunks, void* whole);

}  // namespace megashard
