#pragma once

#include <utility>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// Reads the rotary embedding from config.json, with a family's defaults: rope_theta with rope_parameters (transformers
/// 5) or rope_scaling (transformers 4). Throws an error that names both places if they differ, and for parameters that
/// transformers' classes of these families do not support. Uses head_dim and max_positions of `network`. `partial`: the
/// family reads partial_rotary_factor.
RotaryConfig read_rotary(const HfConfig& config, const RotaryConfig& defaults, const DecoderConfig& network,
                         bool partial = false);

/// {full, sliding} for a family (Gemma 3) whose full-attention layers use rope_theta, possibly scaled, and whose
/// sliding layers use `sliding_key` (rope_local_base_freq). transformers 5 has separate rope_parameters for them.
std::pair<RotaryConfig, RotaryConfig> read_rotary_by_layer(const HfConfig& config, double full_theta,
                                                           const char* sliding_key, double sliding_theta,
                                                           const DecoderConfig& network);

/// rope_parameters of the layers of this type, or `defaults` without rope_parameters (Gemma 4): rope_type default or
/// proportional.
RotaryConfig read_rotary_of(const HfConfig& config, const char* layers, RotaryConfig defaults);

/// The object that says the positions: rope_scaling if it has keys, else rope_parameters. Empty if there is none.
const nlohmann::ordered_json& position_keys(const HfConfig& config);

/// config.json, with YaRN of this theta, factor and original length as rope_parameters, and Mistral's temperature, if
/// it says no positions.
struct YarnDefaults {
  double theta, factor, original_max_positions;
};
HfConfig with_yarn(const HfConfig& config, const YarnDefaults& defaults);

/// Reads llama_4_scaling_beta and original_max_position_embeddings among the positions. Throws without them.
QueryTemperature read_query_temperature(const HfConfig& config);

}  // namespace megashard
