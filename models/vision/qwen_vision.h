#pragma once

#include <functional>
#include <memory>

#include "models/config/vision_config.h"
#include "models/network/encoder.h"
#include "models/vision/picture_encoder.h"

namespace megashard {

/// The encoder of Qwen2.5-VL, Qwen3-VL and Qwen3.5: `visual`, a VisionTower.
EncoderSpecPtr qwen_vision(VisionLanguageConfig config);

/// Describes a tower with the module `visual`, whose `blocks` are VisionBlocks.
PictureTowerSpec visual_blocks(std::function<std::shared_ptr<PictureTower>()> build);

}  // namespace megashard
