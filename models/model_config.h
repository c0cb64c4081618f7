#pragma once

#include "checkpoint/hugging_face/hf_config.h"
#include "framework/arguments/arguments.h"
#include "models/network/network.h"

namespace megashard {

/// From Megatron's flags, by the rules of derive_network. Parameters have Hugging Face's names nevertheless.
DecoderConfig decoder_config_from_flags(const Arguments& arguments);
/// The network that the arguments ask for: --hf-model's, with the flags that may change it, or the flags' own. Throws
/// for flags that contradict it, and for ranks that cannot share it.
Network network_of(const Arguments& arguments);
/// The same from --hf-model's config.json.
Network network_of(const Arguments& arguments, const HfConfig& config);
DecoderConfig decoder_config(const Arguments& arguments);  ///< of network_of()
/// How this rank builds it: its place among the ranks that share the layers, and options of the computation.
BuildContext build_context(const Arguments& arguments);
/// True if config.json describes a model of --model-plugin that no family here reads.
bool is_of_plugin(const Arguments& arguments, const HfConfig& config);
/// True if flags determine how experts are balanced, instead of config.json's output_router_logits and
/// router_aux_loss_coef.
bool replaces_balance_of_config(const Arguments& arguments);

}  // namespace megashard
