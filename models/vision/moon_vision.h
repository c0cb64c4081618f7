#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"

namespace megashard {

/// The encoder of Kimi K2.5: `vision_tower`, MoonViT, and `mm_projector`, with the names of the published files.
/// Neighbours among a head's channels turn together, by columns and rows in turn.
EncoderSpecPtr moon_vision(VisionLanguageConfig config, double projector_norm_eps);

}  // namespace megashard
