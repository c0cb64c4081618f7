#pragma once

#include "models/config/vision_config.h"
#include "models/layers/norm.h"
#include "models/network/encoder.h"

namespace megashard {

/// The encoder of Gemma 3: `vision_tower`, SigLIP's, and `multi_modal_projector` (Gemma3MultiModalProjector): the means
/// of merge_size^2 patches, their norm, and a product.
EncoderSpecPtr siglip_vision(VisionLanguageConfig config, NormSpec projector_norm);

}  // namespace megashard
