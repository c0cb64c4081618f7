#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace megashard {

/// Rows [offset, offset + size) of one dimension.
struct ChunkRange {
  int64_t offset = 0;
  int64_t size = 0;
};

/// Chunk `index` of `length` rows split into `chunks` by torch.chunk's rule: chunks of ceil(length / chunks), then a
/// shorter one, then empty ones at offset `length`.
inline ChunkRange chunk_range(int64_t length, int64_t chunks, int64_t index) {
  TORCH_CHECK_VALUE(length >= 0 && chunks > 0 && 0 <= index && index < chunks, "chunk_range: chunk ", index, " of ",
                    chunks, " of ", length, " rows does not exist");
  const int64_t size = (length + chunks - 1) / chunks;
  const int64_t offset = std::min(index * size, length);
  return {.offset = offset, .size = std::min(size, length - offset)};
}

}  // namespace megashard
