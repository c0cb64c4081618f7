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

/// Flattens as torch.distributed.checkpoint does (since 2.4): dicts and classes made of dict
/// always, lists when they hold such or tensors, tuples never. Throws when two leaves get one key,
/// and when a dict's key is none of text, number, bool and None.
std::vector<FlatValue> flatten_values(const Dict& nested);

/// The other way: strings lead into dicts, indices into lists, whose gaps are None. Of equal paths
/// the last one counts. `keys`: how many the checkpoint has, asked for or not; throws when a list
/// index is larger, or the lists have more gaps than that, and when a leaf lies inside another one.
Dict nest_values(std::vector<FlatValue> leaves, size_t keys);

}  // namespace megashard
