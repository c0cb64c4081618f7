#pragma once

namespace megashard {

// Columns of batches of latents that single models take, besides those of framework/batch.h.

/// [B, L, D]: HunyuanVideo 1.5: of the encoder that sees letters; LTX-2: what the sound takes.
inline constexpr const char* kSecondText = "second_text_features";
inline constexpr const char* kSecondTextMask = "second_text_mask";  ///< [B, L] bool: false for padding

inline constexpr const char* kSounds = "sounds";               ///< [B, S, P] fp32, noisy: latents of a video's sound
inline constexpr const char* kSoundTargets = "sound_targets";  ///< [B, S, P] fp32: what the model is to predict
inline constexpr const char* kSoundNoise = "sound_noise";      ///< [B, S, P] fp32: in place of a drawn one
inline constexpr const char* kFrameRates = "frame_rates";      ///< [B] fp32: frames of a second; absent: 24

}  // namespace megashard
