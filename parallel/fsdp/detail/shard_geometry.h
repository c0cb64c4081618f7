#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/copies/batched_copy.h"

namespace megashard {

/// How a contiguous tensor is cut over ranks: along one dimension by torch.chunk's rule, or along its leading
/// dimensions as if they were one. A rank's chunk is contiguous too; in the whole it lies as `runs` equal runs, one for
/// each index of the dimensions before the cut.
struct ShardGeometry {
  std::vector<int64_t> sizes;  // of the whole
  int64_t dim = 0;
  int64_t merged = 1;  // leading dimensions that are cut as one; more than 1 only if dim is 0
  int ranks = 1;
  int64_t numel = 0;        // of the whole
  int64_t runs = 1;         // 1 for dimension 0
  int64_t chunk_numel = 0;  // of the first rank's chunk: the padded local size

  ShardGeometry() = default;
  ShardGeometry(std::vector<int64_t> whole, int64_t cut, int chunks);
  /// Cut along the first `leading` dimensions. Every chunk is a box of the whole, which is all that offsets and sizes,
  /// and so a checkpoint, can say of it: whole slices of one dimension, or an equal part of one. None where the sizes
  /// do not allow it.
  static std::optional<ShardGeometry> of_leading(std::vector<int64_t> whole, int64_t leading, int chunks);

  /// The chunk as a box: where it begins and how far it reaches in each dimension.
  std::vector<int64_t> offsets(int rank) const;
  std::vector<int64_t> local_sizes(int rank) const;
  /// Other sizes of the same elements, whose dimension `dim` is what is cut: the leading dimensions are one there.
  std::vector<int64_t> as_cut(std::vector<int64_t> whole_or_chunk) const;
  bool even() const { return chunk_numel * ranks == numel; }
  /// Even chunks that follow one another in the whole: they can be sent from there and received there.
  bool contiguous_chunks() const { return even() && runs == 1; }

 private:
  std::vector<int64_t> box_;  // of leading dimensions: what every chunk has of them
};

/// Chunks of all ranks in one buffer: rank r's begins `stride` elements after rank r - 1's.
struct ChunkBuffer {
  void* first = nullptr;  ///< of rank 0
  at::ScalarType dtype = at::kByte;
  int64_t stride = 0;
};

/// Adds the copies that take a whole tensor apart into chunks, each padded to the first with zeros (chunk_cat). whole:
/// null for zeros.
void add_chunk_cat(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const void* whole,
                   at::ScalarType dtype, const ChunkBuffer& chunks);
/// Adds those that put it together again, in the dtype of the chunks (split_with_sizes_copy).
void add_copy_out(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const ChunkBuffer& chunks, void* whole);

}  // namespace megashard
