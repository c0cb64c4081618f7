#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"

namespace megashard {

/// What differs between Step3-VL's towers, besides sizes.
struct StepVisionSpec {
  double first_scale = 0.1;  ///< initial value of the vectors that multiply the branches
  bool projector_bias = false;
};

/// The encoder of Step3-VL: `vision_model`, a ViT over square tiles of several sizes, whose features two convolutions
/// merge, and `vit_large_projector`, with the names of the published files.
EncoderSpecPtr step_vision(VisionLanguageConfig config, StepVisionSpec spec);

}  // namespace megashard
