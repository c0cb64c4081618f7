#pragma once

#include <optional>

#include "checkpoint/hugging_face/hf_config.h"
#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"

namespace megashard {

/// Writes the network of --hf-model into the arguments in Megatron's terms, for the banner and checkpoints. Throws for
/// contradictions; warns if --seq-length is beyond the model's positions. Returns its config.json, the only time that a
/// run reads it; nullopt without --hf-model.
std::optional<HfConfig> take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink);

}  // namespace megashard
