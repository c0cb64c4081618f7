#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"

namespace megashard {

enum class VisionKind { kQwen2_5, kQwen3, kGlm4 };

/// How a learned table of positions on a square grid is read for pictures of other sizes.
enum class PositionTaps {
  kLinearEnds,     ///< linearly, the ends of both upon each other
  kLinearCentres,  ///< linearly, by the centres of patches
  kCubicCentres
};

/// Class names that a vision tower's modules report, for wrap policies.
struct VisionNames {
  std::string tower{}, patch_embed{}, block{}, attention{}, mlp{}, norm{}, merger{};
};

/// A vision tower: maps patches of images and frames to features for the decoder.
struct VisionConfig {
  VisionKind kind = VisionKind::kQwen2_5;
  VisionNames names{};
  int64_t depth = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_heads = 0;
  int64_t in_channels = 3;
  int64_t patch_size = 0;           ///< pixels per side
  int64_t temporal_patch_size = 0;  ///< frames
  int64_t merge_size = 0;           ///< patches per side that are merged into one feature
  int64_t out_hidden_size = 0;      ///< size of a feature
  double rotary_theta = 10000;
  Activation activation = Activation::kSilu;
  double norm_eps = 1e-6;
  bool qkv_bias = true, block_bias = true;  ///< gives biases to q, k and v; to the other layers of a block
  // Qwen2.5: attention in windows, except in these blocks, which attend to whole frames.
  int64_t window_size = 0;  ///< pixels per side
  std::vector<int64_t> full_attention_blocks{};
  // Qwen3: learned positions on a square grid, interpolated; features of these blocks are added to the decoder's first
  // layers.
  int64_t position_side = 0;
  PositionTaps positions = PositionTaps::kLinearEnds;
  bool images_only = false;    ///< refuses videos
  bool square_images = false;  ///< refuses these and other images
  // SigLIP: every picture has as many rows and columns of patches, each with a learned position.
  int64_t fixed_side = 0;
  std::vector<int64_t> deepstack_blocks{};
  bool numbered_mergers = false;  ///< mergers have modules ln_q, mlp.0 and mlp.2, not norm, linear_fc1 and linear_fc2
  std::string deepstack_list = "deepstack_merger_list";  ///< name of the module with the mergers of those blocks

  int64_t pixels_of_patch() const { return in_channels * temporal_patch_size * patch_size * patch_size; }
};

/// Tokens of videos with sound: the features of both alternate between these two and the tokens that end them.
struct SoundTokens {
  int64_t audio = 0;         ///< stands for a feature of audio
  int64_t audio_start = 0;   ///< begins audio
  int64_t vision_start = 0;  ///< begins an image or a video
};

/// A vision tower and its connection to the decoder.
struct VisionLanguageConfig {
  VisionConfig vision{};
  std::string model_name{};  ///< class of the module `model`
  int64_t image_token_id = 0;
  int64_t video_token_id = 0;
  /// Qwen2.5: distance of a video's position ids per second. Unset (Qwen3): timestamps are part of the text, and every
  /// frame has its own positions.
  std::optional<double> tokens_per_second{};
  /// Qwen3-Omni: positions in time are not rounded, and what follows a picture is behind all of its positions.
  bool exact_times = false;
  std::optional<SoundTokens> sound{};  ///< Qwen3-Omni: videos may have sound
  bool mrope = true;                   ///< pictures' tokens have position ids of their own (M-RoPE)
  bool rows_apart = false;             ///< a token of text follows each row of a picture's features
  bool sees_whole = false;             ///< an image's tokens see all of its tokens
};

}  // namespace megashard
