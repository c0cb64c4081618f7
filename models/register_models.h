#pragma once

#include <memory>

#include "framework/modules/model_registry.h"
#include "models/config/hf_config.h"
#include "models/network/network.h"

namespace megashard {

/// Adds the families of models/families/, by Hugging Face architecture (LlamaForCausalLM) and by
/// model_type (llama), and "gpt", the network of Megatron's flags; and their Megatron layouts.
void register_models(ModelRegistry& registry);

/// The model that config.json describes; `network`: its decoder.
std::shared_ptr<MultiModalModule> make_model(const HfConfig& config, Network network, BuildContext context);

}  // namespace megashard
