#pragma once

#include <vector>

#include "parallel/sequence_parallel/block_attention.h"
#include "parallel/sequence_parallel/ring_attention.h"

namespace megashard {

/// Some queries of a place and some keys of another, by their rows there, that attention takes together.
struct RingBlock {
  RowRange queries, keys;
  BlockMask mask{};
};

/// What is to be done at `place` of a ring of `places` with the keys of `source`, each of which has `rows` rows; every
/// pair of a query and a key that it sees is in one block. Blocks that a window leaves empty are left out. Masks are
/// made on `device`, without a wait of the host.
std::vector<RingBlock> ring_blocks(const RingMask& mask, int64_t places, int64_t place, int64_t source, int64_t rows,
                                   c10::Device device);

}  // namespace megashard
