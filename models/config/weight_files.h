#pragma once

#include <string>
#include <vector>

#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// How a family's published files have the experts of a layer.
struct ExpertFiles {
  /// Both tensors packed as [E, 2 I, C] and [E, C, I], transposed, one expert by one, or transposed with the channels
  /// of gate and up in turn (GPT-OSS).
  enum class Form { kPacked, kTransposed, kSeparate, kInterleaved };
  Form form = Form::kSeparate;
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";  ///< names of an expert's own weights
};

/// What is different in a family's published files. Files with the model's own names can be read, too.
struct WeightFiles {
  std::vector<WeightRenaming> renamings{};
  ExpertFiles experts{};
};

}  // namespace megashard
