#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/config/vision_config.h"

namespace megashard {

/// Segments of patches that attend to each other. Segments of equal length are adjacent, so that one attention call
/// computes all of them.
struct Segments {
  struct Run {
    int64_t length;  ///< patches of a segment
    int64_t count;   ///< segments
  };
  std::vector<Run> runs;
  at::Tensor order;    ///< [P] int64: patches in the order of the runs; undefined: unchanged
  at::Tensor inverse;  ///< back

  template <class F>
  void visit_tensors(F&& f) {
    f(order);
    f(inverse);
  }
};

/// Segments of rows side by side, of these lengths.
Segments segments_of(const std::vector<int64_t>& lengths);

/// A tower's plan, computed on the host from the grids of images and videos. P patches become P / merge^2 features;
/// patches are ordered in units of merge^2, as by Hugging Face's processors.
struct VisionPlan {
  int64_t patches = 0;
  int64_t features = 0;
  at::Tensor unit_order;    ///< [features] int64: units in the tower's order; undefined: unchanged
  at::Tensor unit_inverse;  ///< back
  at::Tensor positions;     ///< [P, 2] int64 row and column of each patch, in the tower's order
  Segments frames;          ///< an image, or each frame of a video
  Segments windows;         ///< Qwen2.5
  at::Tensor taps;          ///< [P, 4 or 16] int64: rows of a learned table of positions; undefined: there is none
  at::Tensor tap_weights;   ///< their weights, fp32
};

/// `grids` [N, 3] int64 on the CPU: frames, rows and columns of patches, as check_grids accepts them.
VisionPlan plan_vision(const VisionConfig& config, const at::Tensor& grids);

/// Throws an error with `name` (image_grid_thw) unless all values are positive and the merge size divides rows and
/// columns.
void check_grids(const VisionConfig& config, const at::Tensor& grids, const std::string& name);

}  // namespace megashard
