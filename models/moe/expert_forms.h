#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/weights/weight_map.h"
#include "models/config/weight_files.h"

namespace megashard {

/// Sizes of the experts of a layer.
struct ExpertSizes {
  int64_t experts, hidden, intermediate;
  bool gated = true;
};

/// The forms in which files have the experts of a layer, the published one first: gate_up_proj [E, 2, I, C] (without a
/// gate: up_proj [E, I, C]) and down_proj [E, C, I] of the module `path`, "model.layers.0.mlp.experts." All can be
/// read. Square experts are published packed: transformers transposes a tensor only if its sizes differ from its own.
WeightGroup expert_forms(const std::string& path, const ExpertSizes& sizes, const ExpertFiles& published);

}  // namespace megashard
