#pragma once

#include <utility>

#include "models/config/decoder_config.h"
#include "models/config/hf_config.h"

namespace megashard {

/// Rotary positions of config.json, on top of a family's defaults: rope_theta with rope_parameters
/// (transformers 5) or rope_scaling (transformers 4). Throws an error that names both places where
/// two of them differ, and for what transformers' classes of these families do not compute. Of
/// `network` it reads head_dim and max_positions.
RotaryConfig read_rotary(const HfConfig& config, const RotaryConfig& defaults, const DecoderConfig& network);

/// Of a family (Gemma 3) whose layers of full attention turn by rope_theta and may be scaled, and
/// whose sliding ones turn by rope_local_base_freq: {full, sliding}. transformers 5 has an object of
/// rope_parameters for each.
std::pair<RotaryConfig, RotaryConfig> read_rotary_by_layer(const HfConfig& config, double full_theta,
                                                           double sliding_theta, const DecoderConfig& network);

}  // namespace megashard
