#pragma once

#include <vector>

#include "parallel/sequence_parallel/block_attention.h"
#include "parallel/sequence_parallel/ring_attention.h"

namespace megashard {

/// Queries of one place and keys of another, by their rows there, that are processed together.
struct RingBlock {
  RowRange queries, keys;
  BlockMask mask{};
};

/// Blocks that `place` of a ring of `places` computes with the keys of `source`; each place has `rows` rows. Every pair
/// of a query and a key it attends to is in exactly one block. Blocks outside the window are left out. Masks are
/// created on `device` without blocking the host.
std::vector<RingBlock> ring_blocks(const RingMask& mask, int64_t places, int64_t place, int64_t source, int64_t rows,
                                   c10::Device device);

}  // namespace megashard
