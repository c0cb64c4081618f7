#pragma once

#include "checkpoint/weights/weight_map.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// A model's tensors in the published forms of the map, for save_hf_sharded; names are those of the forms, not yet
/// renamed. Shards of rows of transposed experts would be columns in the file, a few bytes at a time, so the ranks that
/// share experts gather them, and each has some of them whole. Collective over these ranks.
ShardedTensors published_tensors(const ShardedTensors& tensors, const WeightMap& map);

}  // namespace megashard
