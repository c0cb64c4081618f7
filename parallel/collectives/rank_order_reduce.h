#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// dtypes of a reduction's inputs and result: the same, or 16-bit floats and fp32.
struct ReducedTypes {
  c10::ScalarType from;
  c10::ScalarType to;
};

/// out[i] = op over sources[0][i], sources[1][i], ..., in that order, for `count` elements (fp32, bf16, fp16, fp64,
/// int64, uint8). 16-bit floats are added in fp32 and rounded once, or not at all for an fp32 result; kAvg divides by
/// the number of sources at the end. `out` may be one of the sources with its dtype.
void reduce_in_rank_order(void* out, const std::vector<const void*>& sources, int64_t count, ReducedTypes types,
                          ReduceOp op);

}  // namespace megashard
