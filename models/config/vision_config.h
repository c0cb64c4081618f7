#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"

namespace megashard {

enum class VisionKind { kQwen2_5, kQwen3 };

/// Class names that the modules of a vision tower answer, for wrap policies.
struct VisionNames {
  std::string tower, patch_embed, block, attention, mlp, norm, merger;
};

/// A vision tower of the Qwen-VL families: patches of images and frames to features of the decoder.
struct VisionConfig {
  VisionKind kind = VisionKind::kQwen2_5;
  VisionNames names{};
  int64_t depth = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_heads = 0;
  int64_t in_channels = 3;
  int64_t patch_size = 0;           ///< pixels a side
  int64_t temporal_patch_size = 0;  ///< frames
  int64_t merge_size = 0;           ///< patches a side that become one feature
  int64_t out_hidden_size = 0;      ///< of a feature
  double rotary_theta = 10000;
  Activation activation = Activation::kSilu;
  double norm_eps = 1e-6;
  // Qwen2.5: attention in windows, but in these blocks over whole frames.
  int64_t window_size = 0;  ///< pixels a side
  std::vector<int64_t> full_attention_blocks{};
  // Qwen3: learned positions on a square, interpolated; features of these blocks go to the first
  // layers of the decoder.
  int64_t position_side = 0;
  std::vector<int64_t> deepstack_blocks{};

  int64_t pixels_of_patch() const { return in_channels * temporal_patch_size * patch_size * patch_size; }
};

/// A vision-language model of these families: tower, decoder, and how they meet.
struct VisionLanguageConfig {
  DecoderConfig text{};
  VisionConfig vision{};
  std::string model_name{};  ///< class of the module `model`
  int64_t image_token_id = 0;
  int64_t video_token_id = 0;
  /// Qwen2.5: position ids of a video's frames are this far apart in a second. Unset (Qwen3):
  /// timestamps stand in the text, and every frame is placed by itself.
  std::optional<double> tokens_per_second{};
};

}  // namespace megashard
