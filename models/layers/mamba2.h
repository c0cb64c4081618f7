#pragma once

#include <cstdint>
#include <string>

#include "models/layers/norm.h"
#include "models/layers/part.h"

namespace megashard {

/// Mamba-2: inputs pass a short causal convolution, then a scan with a state for each head (kernels/state_space.h), a
/// gate, and a norm of each group of channels (transformers' NemotronHMamba2Mixer).
struct Mamba2Spec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  int64_t heads = 0;
  int64_t groups = 1;  ///< a divisor of heads: these share what a token writes and reads
  int64_t head_dim = 0, state_dim = 0;
  int64_t conv_width = 4;
  bool conv_bias = true;
  bool bias = false;  ///< gives the projections biases
  Activation activation = Activation::kSilu;
  /// Range of the steps of time that dt_bias stands for at first, and their minimum. No step is below first_step.
  double first_step = 0.001, last_step = 0.1, step_floor = 1e-4;
  NormSpec norm{};               ///< norms heads * head_dim channels
  double output_init_scale = 1;  ///< factor of the initialisation's std for out_proj

  int64_t width() const { return heads * head_dim; }
  int64_t state_width() const { return groups * state_dim; }
};

PartSpecPtr mamba2_part(Mamba2Spec spec);

}  // namespace megashard
