#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// out[i] = op over sources[0][i], sources[1][i], ..., in that order: `count` elements of `dtype`
/// (fp32, bf16, fp16, fp64, int64, uint8) in memory. 16-bit floats are accumulated in fp32 and
/// rounded once; kAvg divides by the number of sources at the end. `out` may be one of the sources.
void reduce_in_rank_order(void* out, const std::vector<const void*>& sources, int64_t count, c10::ScalarType dtype,
                          ReduceOp op);

}  // namespace megashard
