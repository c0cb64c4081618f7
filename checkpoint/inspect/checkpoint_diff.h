#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// A tensor that differs between two checkpoints.
struct TensorDifference {
  std::string name;
  std::string a;  ///< "float32[2, 3]"; empty: absent
  std::string b;
  int64_t differing = 0;  ///< number of elements whose bits (same dtype) or values differ
  double largest = 0;     ///< max |a - b|; NaN if only one side is NaN
};

struct ValueDifference {
  std::string key;
  std::string a;  ///< as text; empty: absent
  std::string b;
};

struct CheckpointDifference {
  std::vector<TensorDifference> tensors;
  std::vector<ValueDifference> values;
  int64_t equal_tensors = 0;
  int64_t equal_values = 0;

  bool any() const { return !tensors.empty() || !values.empty(); }
};

/// Compares tensors and values by name, in any formats. Reads tensors some rows at a time. Values that only one format
/// has (a step's arguments compared with safetensors) are differences too. Namespaces are compared field by field.
/// `wanted` selects by name; null: all.
CheckpointDifference diff_checkpoints(CheckpointReader& a, CheckpointReader& b,
                                      const std::function<bool(const std::string&)>& wanted = {});

}  // namespace megashard
