#pragma once

#include "models/config/audio_config.h"
#include "models/network/encoder.h"

namespace megashard {

// Columns of items, as the processors of Qwen make them, of all clips of a batch in its order.
inline constexpr const char* kAudioFrames = "input_features";          ///< [frames, bins] fp32: mel spectrograms
inline constexpr const char* kAudioLengths = "audio_feature_lengths";  ///< [clips] int64: number of frames

/// The encoder of clips of sound, whose features take the places of the tokens AudioConfig::token_id.
EncoderSpecPtr audio_encoder(AudioConfig config);

}  // namespace megashard
