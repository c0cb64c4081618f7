#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "checkpoint/values/value.h"
#include "framework/arguments/argument_table.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// The network in Megatron's terms: what its arguments would be. Names that are missing here cannot be contradicted.
std::map<std::string, ArgumentValue> network_values(const DecoderConfig& config);

/// A message for each given flag that contradicts config.json, naming both. --init-method-std overrides config.json
/// instead; --untie-embeddings-and-output-weights is reported to have no effect.
std::vector<std::string> contradictions(const DecoderConfig& config, const Arguments& arguments);

/// Megatron's arguments for the network, by their names in a checkpoint's `args`.
Dict network_arguments(const DecoderConfig& config);

/// Writes the network of --hf-model into the arguments in Megatron's terms, for the banner and checkpoints. Throws for
/// contradictions; warns if --seq-length is beyond the model's positions. Returns its config.json, the only time that a
/// run reads it; nullopt without --hf-model.
std::optional<HfConfig> take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
