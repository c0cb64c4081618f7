#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"

namespace megashard {

/// The encoder of Qwen2.5-VL, Qwen3-VL and Qwen3.5: `visual`, a VisionTower.
EncoderSpecPtr qwen_vision(VisionLanguageConfig config);

}  // namespace megashard
