#pragma once

#include <string>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "models/model_config.h"

namespace megashard {

/// A message about each flag given that says something else than config.json (naming both).
/// --init-method-std overrides instead, and --untie-embeddings-and-output-weights is told to have no effect.
std::vector<std::string> contradictions(const DecoderConfig& config, const Arguments& arguments);

/// Megatron's arguments that describe the network, by their names in a checkpoint's `args`.
Dict network_arguments(const DecoderConfig& config);

/// Writes the network that --hf-model describes into the arguments, in Megatron's terms: what the
/// banner shows and checkpoints keep. Contradictions are refused; a --seq-length beyond the
/// positions that the model knows is warned of. Without --hf-model, nothing.
void take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
