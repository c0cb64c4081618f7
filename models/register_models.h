#pragma once

#include <memory>

#include "checkpoint/hugging_face/hf_config.h"
#include "framework/modules/model_registry.h"
#include "models/network/network.h"

namespace megashard {

/// Registers all families by Hugging Face architecture (LlamaForCausalLM) and model_type (llama), with their Megatron
/// layouts, "gpt", the network of Megatron's flags, and classes of diffusers (WanTransformer3DModel).
void register_models(ModelRegistry& registry);

/// The model that config.json describes; `network`: its decoder.
std::shared_ptr<MultiModalModule> make_model(const HfConfig& config, Network network, BuildContext context);

}  // namespace megashard
