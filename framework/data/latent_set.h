#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Holds a sample of a model of latents: a video, or a picture as one of a single frame. Undefined tensors are absent.
struct LatentSample {
  at::Tensor latents;         ///< "video" [C, F, H, W] fp32
  at::Tensor text_features;   ///< "prompt_ids" [L, D]
  at::Tensor text_mask;       ///< "prompt_mask" [L] bool
  at::Tensor pooled_text;     ///< "pooled_prompt" [P], of a second text encoder (Flux)
  at::Tensor second_text;     ///< the second of two "prompt_ids" [L, D]
  at::Tensor second_mask;     ///< the second of two "prompt_mask" [L] bool
  at::Tensor conditions;      ///< "i2v_vae_feature", or "cond_latents" [Q, F, H, W] fp32
  at::Tensor image_features;  ///< "i2v_clip_feature", or "vision_states" [L, D]
  at::Tensor controls;        ///< "vace_context" [Q, F, H, W] fp32
  at::Tensor sounds;          ///< "sound" [S, P] fp32: latents of the video's sound
  at::Tensor frame_rate;      ///< "frame_rate", one number fp32: frames of a second
  at::Tensor noise;           ///< "noise" [C, F, H, W] fp32: in place of a drawn one
  at::Tensor sound_noise;     ///< "sound_noise" [S, P] fp32: in place of a drawn one
  at::Tensor timestep;        ///< "timestep", one number fp32: in place of a drawn one
  int64_t clean_frames = 0;   ///< "clean_frames": so many frames of latents, the first ones, get no noise
};

/// Features in a folder, as MindSpeed-MM's tools (get_wan_feature.py) and launch/preprocess/preprocess_latents.py write
/// them. DIR/data.jsonl has a line {"file": PATH} for each sample, with a path inside DIR; "shape": [C, F, H, W] saves
/// opening every file at the start. A file is torch.save of a dict with the keys above; tensors may have a first
/// dimension of size 1 in front, and features of two text encoders are lists of two. DIR/empty_prompt.pt, if it exists,
/// has the text features of the empty prompt. Errors name the file and say the remedy.
class LatentSet {
 public:
  explicit LatentSet(const std::string& folder);

  const std::string& folder() const { return folder_; }
  int64_t size() const { return static_cast<int64_t>(files_.size()); }
  /// [C, F, H, W] of a sample's latents.
  const std::array<int64_t, 4>& shape(int64_t sample) const { return shapes_[static_cast<size_t>(sample)]; }
  /// Patches of the largest sample.
  int64_t most_patches(const std::array<int64_t, 3>& patch) const;
  LatentSample read(int64_t sample) const;
  /// The text's features and masks of the empty prompt; undefined without empty_prompt.pt.
  const LatentSample& empty_prompt() const { return empty_prompt_; }

 private:
  void add_line(const std::string& line, int64_t number);

  std::string folder_;
  std::vector<std::string> files_;
  std::vector<std::array<int64_t, 4>> shapes_;
  LatentSample empty_prompt_;
};

/// How many patches latents of `shape` [C, F, H, W] have by frames, rows and columns.
std::array<int64_t, 3> patch_grid(const std::array<int64_t, 4>& shape, const std::array<int64_t, 3>& patch);

inline constexpr const char* kLatentsFile = "/data.jsonl";

}  // namespace megashard
