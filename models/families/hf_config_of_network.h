#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "models/config/decoder_config.h"

namespace megashard {

/// config.json for a network of Megatron's flags, for the first family whose class supports it; nullopt if none does.
/// Does not include tying and dtype, which the run determines.
std::optional<nlohmann::ordered_json> hf_config_of_network(const DecoderConfig& network);

}  // namespace megashard
