#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "checkpoint/weights/weight_map.h"

namespace megashard {

/// diffusers' WanTransformer3DModel, and with control layers WanVACETransformer3DModel.
struct WanConfig {
  bool has_original_files = false;  ///< whose names are those of Wan's own code
  std::array<int64_t, 3> patch{1, 2, 2};
  int64_t num_heads = 40;
  int64_t head_dim = 128;
  int64_t in_channels = 16;   ///< channels of latents and conditions
  int64_t out_channels = 16;  ///< channels of latents
  int64_t text_dim = 4096;
  int64_t time_channels = 256;  ///< channels of a timestep's waves (freq_dim)
  int64_t ffn_dim = 13824;
  int64_t num_layers = 40;
  bool cross_attn_norm = true;
  double eps = 1e-6;
  int64_t image_dim = 0;                  ///< width of kImageFeatures; 0: the model takes none
  int64_t image_positions = 0;            ///< learned positions of image features (pos_embed_seq_len); 0: none
  std::vector<int64_t> control_layers{};  ///< take what the control blocks make, one each (vace_layers); empty: none
  int64_t control_channels = 0;           ///< channels of kControls (vace_in_channels)

  int64_t width() const { return num_heads * head_dim; }
  int64_t box() const { return patch[0] * patch[1] * patch[2]; }
};

WanConfig wan_config(const HfConfig& config);
/// Reads config.json of Wan's own code (WanModel). Whether a model from an image takes CLIP's features, as Wan 2.1,
/// is only in the weights beside it; without weights it does.
WanConfig original_wan_config(const HfConfig& config);

/// Names of the weights in diffusers and in files of Wan's own code.
std::vector<WeightRenaming> original_wan_names(const WanConfig& config);

/// Features of a picture by CLIP's ViT-H.
inline constexpr int64_t kWanImageLength = 257;

}  // namespace megashard
