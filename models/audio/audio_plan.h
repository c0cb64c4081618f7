#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/config/audio_config.h"
#include "models/vision/vision_plan.h"

namespace megashard {

/// An audio tower's plan, computed on the host from the lengths of a batch's clips.
struct AudioPlan {
  /// Chunks that are convolved with one length.
  struct Chunks {
    int64_t length = 0;   ///< frames, padding included
    at::Tensor frames{};  ///< [chunks, length] int64: numbers of the batch's frames; AudioPlan::frames for padding
  };
  std::vector<Chunks> chunks{};
  int64_t frames = 0;
  at::Tensor rows{};    ///< [features] int64: the convolved rows of all chunks that belong to clips, in their order
  Segments windows{};   ///< ranges of features that attend to each other
  at::Tensor counts{};  ///< [clips] int64: features of each
};

/// `lengths` [clips] int64 on the CPU: number of frames, positive.
AudioPlan plan_audio(const AudioConfig& config, const at::Tensor& lengths);

}  // namespace megashard
