#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/config/vision_config.h"

namespace megashard {

/// Which patches attend to each other: segments of equal length lie next to each other, so that one
/// attention call takes all of a length.
struct Segments {
  struct Run {
    int64_t length;  ///< patches of a segment
    int64_t count;   ///< segments
  };
  std::vector<Run> runs;
  at::Tensor order;    ///< [P] int64, the patches as the runs have them; undefined: as they come
  at::Tensor inverse;  ///< back

  template <class F>
  void visit_tensors(F&& f) {
    f(order);
    f(inverse);
  }
};

/// What a tower works out from the grids of images and videos, on the host. P patches become
/// P / merge^2 features; patches come merge^2 by merge^2 (a unit), as the processors of Hugging
/// Face give them.
struct VisionPlan {
  int64_t patches = 0;
  int64_t features = 0;
  at::Tensor unit_order;    ///< [features] int64: units as the tower has them; undefined: as given
  at::Tensor unit_inverse;  ///< back
  at::Tensor positions;     ///< [P, 2] int64 row and column of each patch, in the tower's order
  Segments frames;          ///< an image, or each frame of a video
  Segments windows;         ///< Qwen2.5
  at::Tensor taps;          ///< Qwen3: [P, 4] int64 rows of the position embedding
  at::Tensor tap_weights;   ///< [P, 4] fp32
};

/// `grids` [N, 3] int64 on the CPU: frames, rows and columns of patches, positive; rows and columns
/// divisible by the merge size (check_grids tells).
VisionPlan plan_vision(const VisionConfig& config, const at::Tensor& grids);

/// Throws an error naming `name` (image_grid_thw) for a tensor that is no such list.
void check_grids(const VisionConfig& config, const at::Tensor& grids, const std::string& name);

}  // namespace megashard
