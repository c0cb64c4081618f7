#pragma once

#include <string>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "models/model_config.h"

namespace megashard {

/// A message for each given flag that contradicts config.json, naming both. --init-method-std overrides config.json
/// instead; --untie-embeddings-and-output-weights is reported to have no effect.
std::vector<std::string> contradictions(const DecoderConfig& config, const Arguments& arguments);

/// Megatron's arguments for the network, by their names in a checkpoint's `args`.
Dict network_arguments(const DecoderConfig& config);

/// Writes the network of --hf-model into the arguments in Megatron's terms, for the banner and checkpoints. Throws for
/// contradictions; warns if --seq-length is beyond the model's positions. No effect without --hf-model.
void take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
