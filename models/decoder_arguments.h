#pragma once

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"

namespace megashard {

/// Writes the network of --hf-model into the arguments in Megatron's terms, for the banner and checkpoints. Throws for
/// contradictions; warns if --seq-length is beyond the model's positions. No effect without --hf-model.
void take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
