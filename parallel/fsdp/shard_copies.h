#pragma once

#include <vector>

#include "parallel/copies/batched_copy.h"
#include "parallel/fsdp/shard_geometry.h"

namespace megashard {

/// Chunks of all ranks in one buffer: rank r's begins `stride` elements after rank r - 1's.
struct ChunkBuffer {
  void* first = nullptr;  ///< of rank 0
  at::ScalarType dtype = at::kByte;
  int64_t stride = 0;
};

/// Adds the copies that take a whole tensor apart into chunks, each padded to the first with zeros.
/// whole: null for zeros.
void add_split(std::vector<RowsCopy>& copies, const ShardGeometry& geometry, const void* whole,
               at::ScalarType dtype, const ChunkBuffer& chunks);
/// Adds those that put it together again, in the dtype of the chunks.
void add_join(std::vector<RowsCopy>& copies, const ShardGeometry& geometry,
              const ChunkBuffer& chunks, void* whole);

}  // namespace megashard
