#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/arguments.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// The network in Megatron's terms: what its arguments would be. Names that are missing here cannot be contradicted.
std::map<std::string, ArgumentValue> network_values(const DecoderConfig& config);

/// A message for each given flag that contradicts config.json, naming both. --init-method-std overrides config.json
/// instead; --untie-embeddings-and-output-weights is reported to have no effect.
std::vector<std::string> contradictions(const DecoderConfig& config, const Arguments& arguments);

/// Megatron's arguments for the network, by their names in a checkpoint's `args`.
Dict network_arguments(const DecoderConfig& config);

}  // namespace megashard
