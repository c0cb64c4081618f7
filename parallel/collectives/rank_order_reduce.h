#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Of a reduction's numbers: what comes from the ranks, and the result. One dtype, or 16-bit floats and fp32.
struct ReducedTypes {
  c10::ScalarType from;
  c10::ScalarType to;
};

/// out[i] = op over sources[0][i], sources[1][i], ..., in that order: `count` elements (fp32, bf16, fp16, fp64, int64,
/// uint8) in memory. 16-bit floats are added in fp32 and rounded once, or not at all where the result is fp32; kAvg
/// divides by the number of sources at the end. `out` may be one of the sources of its dtype.
void reduce_in_rank_order(void* out, const std::vector<const void*>& sources, int64_t count, ReducedTypes types,
                          ReduceOp op);

}  // namespace megashard
