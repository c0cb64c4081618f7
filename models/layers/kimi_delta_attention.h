#pragma once

#include <cstdint>
#include <string>

#include "models/layers/norm.h"
#include "models/layers/part.h"

namespace megashard {

/// Kimi Delta Attention: queries, keys and values pass short causal convolutions, then the delta rule with a decay of
/// each key channel (kernels/delta_rule.h), a norm of each head, and a gate. Decays and gates come from latents of
/// head_dim channels (transformers' KimiLinearDeltaAttention).
struct KimiDeltaAttentionSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;  ///< channels of a key and value
  int64_t conv_width = 4;
  Activation activation = Activation::kSilu;  ///< follows the convolutions
  NormSpec norm{};                            ///< norms each head
  double output_init_scale = 1;               ///< factor of the initialisation's std for o_proj
};

PartSpecPtr kimi_delta_attention_part(KimiDeltaAttentionSpec spec);

}  // namespace megashard
