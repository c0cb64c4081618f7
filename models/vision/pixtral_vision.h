#pragma once

#include "models/config/vision_config.h"
#include "models/layers/norm.h"
#include "models/network/encoder.h"

namespace megashard {

/// Maps the norm of the tower's states, merged, by two linear layers (Mistral3MultiModalProjector).
struct ProjectorSpec {
  std::string class_name{};  ///< for wrap policies
  NormSpec norm{};
  Activation activation = Activation::kGelu;
  bool bias = false;
};

/// The encoder of Mistral 3: `vision_tower`, Pixtral's, and `multi_modal_projector`.
EncoderSpecPtr pixtral_vision(VisionLanguageConfig config, ProjectorSpec projector);

}  // namespace megashard
