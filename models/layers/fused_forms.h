#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// A linear layer of a module and its outputs.
struct LayerRows {
  std::string name;
  int64_t rows;
};
/// The forms in which files have linear layers of one input at `path`, "model.layers.0.mlp.": as the layer `fused`,
/// with the rows of one after those of the other, or each by itself.
WeightGroup fused_forms(const std::string& path, const std::vector<LayerRows>& layers, const std::string& fused,
                        int64_t inputs, bool bias);

}  // namespace megashard
