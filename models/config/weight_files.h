#pragma once

#include <string>
#include <vector>

#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// How a family's published files have the experts of a layer.
struct ExpertFiles {
  enum class Form {
    kPacked,      ///< two tensors [E, 2 I, C] and [E, C, I]
    kTransposed,  ///< two tensors [E, C, 2 I] and [E, I, C]
    kSeparate,    ///< three tensors an expert
    kInterleaved  ///< transposed, and channels of gate and up alternate (GPT-OSS)
  };
  Form form = Form::kSeparate;
  bool only = false;                                                   ///< refuses files of another form
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";  ///< names of an expert's own weights
};

/// Linear layers of one input that a family's published files have as one layer with the rows of all.
struct FusedFiles {
  std::string qkv{};      ///< names the layer with the rows of q_proj, k_proj, v_proj; empty: there is none
  std::string gate_up{};  ///< the same for an MLP's gate_proj, up_proj
};

/// What is different in a family's published files. Files with the model's own names can be read, too.
struct WeightFiles {
  std::vector<WeightRenaming> renamings{};
  ExpertFiles experts{};
  FusedFiles fused{};
  /// Where files may have layers of multi-token prediction, which are read with --mtp-num-layers.
  enum class PredictionLayers {
    kNone,
    kBehindLast,  ///< follow the decoder's last layer (DeepSeek-V3)
    kMtp,         ///< one, under "mtp." (Qwen3.5)
    kOtherMtp     ///< under "mtp.", of a form that is not read
  };
  PredictionLayers prediction_layers = PredictionLayers::kNone;
  /// Beginnings of the names of tensors of other models in the same files, which are not read.
  std::vector<std::string> others{};
};

}  // namespace megashard
