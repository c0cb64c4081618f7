#pragma once

#include <string>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

/// One leaf of a nested state dict.
struct FlatValue {
  std::string key;          ///< the path joined by dots
  std::vector<Value> path;  ///< strings and list indices
  Value value;
};

/// Flattens values as torch.distributed.checkpoint does (since 2.4): dicts and dict subclasses always, lists if they
/// contain such or tensors, tuples never. Throws if two leaves get the same key, and for dict keys other than text,
/// number, bool and None.
std::vector<FlatValue> flatten_values(const Dict& nested);

/// Inverse of flatten_values: strings are keys of dicts, ints are list indices; gaps in lists become None. Of equal
/// paths the last one is used. `keys` is the number of keys in the checkpoint, requested or not. Throws if a list index
/// or the total of gaps exceeds it, and if a leaf lies inside another one.
Dict nest_values(std::vector<FlatValue> leaves, size_t keys);

}  // namespace megashard
