#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "checkpoint/weights/weight_map.h"
#include "models/diffusion/joint_parts.h"

namespace megashard {

/// diffusers' HunyuanVideo15Transformer3DModel.
struct HunyuanVideoConfig {
  bool has_original_files = false;  ///< whose names are those of HunyuanVideo's own code
  int64_t in_channels = 65;         ///< channels of latents, of a condition's latents and of its mask
  int64_t out_channels = 32;        ///< channels of latents
  int64_t num_layers = 54, num_refiner_layers = 2;
  JointSizes sizes{.num_heads = 16, .head_dim = 128};
  int64_t patch = 1, patch_frames = 1;
  int64_t text_dim = 3584, glyph_dim = 1472, image_dim = 1152;
  double theta = 256;
  std::vector<int64_t> axes{16, 56, 56};

  int64_t box() const { return patch_frames * patch * patch; }
};

HunyuanVideoConfig hunyuan_video_config(const HfConfig& config);
/// Reads config.json of HunyuanVideo's own code (HunyuanVideo_1_5_DiffusionTransformer).
HunyuanVideoConfig original_hunyuan_video_config(const HfConfig& config);
/// Adds what is different in files of HunyuanVideo's own code: names, fused projections, the order of two halves.
void add_original_hunyuan_forms(const HunyuanVideoConfig& config, WeightMap& map);

}  // namespace megashard
