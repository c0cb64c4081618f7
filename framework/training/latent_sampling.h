#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "framework/training/inference.h"

namespace megashard {

struct LatentSampling {
  int64_t steps = 50;
  double shift = 1;           ///< noise levels sigma are shift sigma / (1 + (shift - 1) sigma) of equally spaced ones
  double guidance_scale = 1;  ///< 1: without a second forward for the empty prompt
  at::Tensor empty_text_features{}, empty_text_mask{};  ///< the empty prompt's, [L, D] and [L]
};

/// Predictions of a batch of whole sequences on the host: [P, B, T] fp32 on the CPU. One forward, without gradients.
/// Collective.
at::Tensor predictions(MultiModalModule& model, Batch whole, const InferenceRanks& ranks);

/// Latents that a model of velocities (--objective flow-matching) makes of noise, by Euler's method: [P, B, T] fp32 on
/// the CPU. `whole`: a batch of LatentDataset, whose latents only give their sizes, except for clean patches.
/// Collective.
at::Tensor sample_latents(MultiModalModule& model, Batch whole, const LatentSampling& options,
                          const InferenceRanks& ranks);

}  // namespace megashard
