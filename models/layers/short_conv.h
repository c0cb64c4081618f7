#pragma once

#include <cstdint>
#include <string>

#include "models/layers/part.h"

namespace megashard {

/// A mixer of neighbouring tokens: out_proj(c * conv(b * x)), where b, c and x are the thirds of in_proj's output and
/// conv is a causal convolution of each channel (transformers' Lfm2ShortConv).
struct ShortConvSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t width = 3;             ///< tokens that an output depends on
  bool bias = false;             ///< gives the projections and the convolution biases
  double output_init_scale = 1;  ///< factor of the initialisation's std for out_proj
};

PartSpecPtr short_conv_part(ShortConvSpec spec);

}  // namespace megashard
