#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"

namespace megashard {

/// The encoder of GLM-4.5V: `visual`. Patches, their norm and positions, VisionBlocks, a convolution that merges
/// patches, and a gated MLP (Glm4vMoeVisionModel). `merger_width`: hidden channels of that MLP; the config's
/// intermediate_size is that of the blocks.
EncoderSpecPtr glm_vision(VisionLanguageConfig config, int64_t merger_width);

}  // namespace megashard
