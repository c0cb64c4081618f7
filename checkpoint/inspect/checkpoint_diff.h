#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// A tensor that two checkpoints hold differently.
struct TensorDifference {
  std::string name;
  std::string a;  ///< "float32[2, 3]"; empty: not there
  std::string b;
  int64_t differing = 0;  ///< elements whose bits differ (of the same dtype) or whose values do
  double largest = 0;     ///< |a - b|; NaN when a NaN stands against a number
};

struct ValueDifference {
  std::string key;
  std::string a;  ///< as text; empty: not there
  std::string b;
};

struct CheckpointDifference {
  std::vector<TensorDifference> tensors;
  std::vector<ValueDifference> values;
  int64_t equal_tensors = 0;
  int64_t equal_values = 0;

  bool any() const { return !tensors.empty() || !values.empty(); }
};

/// Compares by names, whatever the formats are. Tensors are read some rows at a time. Values of
/// which only one format has any (as a step's arguments beside safetensors) are differences too;
/// namespaces are compared field by field. `wanted` chooses by name; null: all.
CheckpointDifference diff_checkpoints(CheckpointReader& a, CheckpointReader& b,
                                      const std::function<bool(const std::string&)>& wanted = {});

}  // namespace megashard
