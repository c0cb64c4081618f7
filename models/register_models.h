#pragma once

#include "framework/modules/model_registry.h"

namespace megashard {

/// Adds this folder's families: by Hugging Face architecture (LlamaForCausalLM), by model_type
/// (llama), and "gpt", the network of Megatron's flags; and their Megatron layouts.
void register_models(ModelRegistry& registry);

}  // namespace megashard
