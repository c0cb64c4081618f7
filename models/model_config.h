#pragma once

#include "framework/arguments/arguments.h"
#include "models/config/decoder_config.h"

namespace megashard {

/// From Megatron's flags, by the rules of derive_network. Parameters get Hugging Face's names all
/// the same.
DecoderConfig decoder_config_from_flags(const Arguments& arguments);
/// The one that the arguments ask for: of --hf-model, with contradicting flags refused and what may
/// be overridden taken from the flags, or of the flags.
DecoderConfig decoder_config(const Arguments& arguments);
/// Whether flags say how experts are balanced, and not output_router_logits and router_aux_loss_coef of config.json.
bool replaces_balance_of_config(const Arguments& arguments);

}  // namespace megashard
