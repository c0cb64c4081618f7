#pragma once

#include <cstdint>
#include <string>

#include "models/layers/norm.h"
#include "models/layers/part.h"

namespace megashard {

/// A linear-attention mixer: queries, keys and values pass a short causal convolution, then the gated delta rule
/// (kernels/delta_rule.h), a norm for each head, and a gate (transformers' Qwen3NextGatedDeltaNet).
struct GatedDeltaNetSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t key_heads = 0;
  int64_t value_heads = 0;  ///< a multiple of key_heads
  int64_t key_dim = 0, value_dim = 0;
  int64_t conv_width = 4;
  NormSpec norm{};  ///< norms each value head
  /// Two projections in_proj_qkvz and in_proj_ba, whose rows are ordered by key head (Qwen3-Next), instead of four:
  /// in_proj_qkv, in_proj_z, in_proj_b, in_proj_a.
  bool packed = false;
  double output_init_scale = 1;  ///< factor of the initialisation's std for out_proj
};

PartSpecPtr gated_delta_net_part(GatedDeltaNetSpec spec);

}  // namespace megashard
