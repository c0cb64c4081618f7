#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Class names that an audio tower's modules report, for wrap policies.
struct AudioNames {
  std::string tower{}, layer{}, attention{}, projector{};
};

/// The audio tower of Qwen3-Omni and Qwen3-ASR, and its connection to the decoder. It maps the frames of a mel
/// spectrogram to features: three convolutions over chunks of frames, each of which halves them, then layers whose
/// attention sees windows of chunks.
struct AudioConfig {
  AudioNames names{};
  std::string model_name{};  ///< class of the module `model`
  int64_t depth = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_heads = 0;
  int64_t mel_bins = 0;
  int64_t conv_channels = 0;
  int64_t chunk = 0;         ///< frames
  int64_t window = 0;        ///< chunks that see each other
  int64_t convolved = 0;     ///< chunks that are convolved at once
  int64_t out_size = 0;      ///< size of a feature
  Activation activation = Activation::kGelu;
  int64_t token_id = 0;  ///< stands for a feature
  /// The two layers behind the tower: a module multi_modal_projector with linear_1 and linear_2, or the tower's own
  /// proj1 and proj2.
  bool has_projector = false;
  /// A clip of less than a chunk is padded to one; false: it is not padded, as in a batch of it alone.
  bool pads_short_clips = false;

  /// Number of features of a chunk of `frames`, after three convolutions.
  static int64_t features_of(int64_t frames);
};

/// Reads audio_config of the model's config.json; `audio` has the defaults of the family and its names. Throws
/// c10::Error for a value that the tower does not compute.
AudioConfig read_audio_config(const HfConfig& model, AudioConfig audio, int64_t hidden_size);

}  // namespace megashard
