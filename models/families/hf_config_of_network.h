#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "models/config/decoder_config.h"

namespace megashard {

/// config.json for a network of Megatron's flags, of the first family whose class computes it;
/// nothing where none does. Without tying and dtype, which are the run's.
std::optional<nlohmann::ordered_json> hf_config_of_network(const DecoderConfig& network);

}  // namespace megashard
