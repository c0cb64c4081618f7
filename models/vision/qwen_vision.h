#pragma once

#include "models/config/vision_config.h"
#include "models/network/encoder.h"
#include "models/vision/vision_plan.h"

namespace megashard {

/// Result of its prepare(): the pictures of a batch and their tokens. With a sequence on several ranks: those that
/// reach into this rank's rows.
struct PicturePlan : InputPlan {
  VisionPlan vision{};         ///< of all images, then all videos
  at::Tensor token_indices{};  ///< of features in this rank's tokens, as PicturePlaces; on the CPU
  /// [features] int64, on the CPU: which of the tower's features these are, if other ranks have tokens of some.
  /// Undefined: the first ones.
  at::Tensor own_features{};
  /// No pictures, but other ranks may have some: the tower runs on one empty unit whose features are left out, so that
  /// its collectives happen and its gradients are zeros.
  bool dummy_image = false;
};

/// The encoder of Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: `visual`, a VisionTower. Its columns of items are pixel_values
/// and pixel_values_videos [patches, C * T * S * S], image_grid_thw and video_grid_thw [pictures, 3] int64, and
/// second_per_grid_ts [videos], as Hugging Face's processors make them, in the order of the batch; any may be absent.
/// Position ids follow from them and the tokens unless they are given.
EncoderSpecPtr qwen_vision(VisionLanguageConfig config);

}  // namespace megashard
