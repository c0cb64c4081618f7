#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Holds MindSpeed-MM's settings of a diffusion model: its features of videos, and its noise (pretrain_sora.py).
struct MindSpeedDiffusion {
  std::string place;         ///< "data.json: dataset_param", the beginning of messages
  std::string dataset_type;  ///< "feature": the data are features already
  std::string task;          ///< "t2v", "i2v", "vace"
  std::string data_path;     ///< data.jsonl of features, or a data.txt of videos; of LTX-2 a folder
  std::string data_folder;   ///< where paths in data.jsonl begin
  std::string pipeline;      ///< folder of diffusers, whose part some key names
  std::string weights;       ///< predictor.from_pretrained
  int64_t rows = 0, columns = 0, frames = 0, text_length = 512;  ///< sizes of a video; tokens of a caption
  double frames_per_second = 0;
  double shift = 3;
  bool is_ltx2 = false;     ///< LTX-2's trainer has written its data; the noise is its
  bool has_sounds = false;  ///< then: the sounds are trained, too
  std::string videos = "latents", texts = "conditions", sounds = "audio_latents";  ///< then: folders in data_path
  int64_t most_samples = 0;                                                        ///< then; 0: all
  double logit_std = 1;                                                            ///< then
  bool is_hunyuan = false;       ///< the noise is that of HunyuanVideo 1.5: `shift` is for samples alone, no weights
  double training_shift = 3;     ///< then in its place
  bool draws_uniformly = false;  ///< then: snr is "uniform"
  /// Range of the timesteps, as shares of the descending table of 1,000 levels.
  double first_share = 0, last_share = 1;

  /// The folder for --data-path.
  std::string features() const;
  /// The shell command that writes it.
  std::string command() const;
  /// The folder of the model in `pipeline`: of Wan 2.2's two that for these timesteps.
  std::string model_folder() const;
  /// The timestep at that share of the table.
  double timestep_at(double share) const;
};

/// Throws UsageError with the command if the features are not written, and where `data_folder` is another folder than
/// that of data.jsonl.
void require_features(const MindSpeedDiffusion& diffusion);

/// Sets --hf-model: the folder of predictor.from_pretrained, that of --load if it has a config.json, or the one in the
/// pipeline that the encoders are from.
void find_diffusion_model(const MindSpeedDiffusion& diffusion, Arguments& arguments);

/// Paths of modules in diffusers' models for MindSpeed-MM's: blocks.{*} for predictor.blocks.{*}. Leaves out the
/// encoders, which prepare the data here.
std::vector<std::string> diffusers_paths(const std::vector<std::string>& patterns);
/// Names of linear layers in the same way: to_q for proj_q.
std::vector<std::string> diffusers_layers(const std::vector<std::string>& names);

}  // namespace megashard
