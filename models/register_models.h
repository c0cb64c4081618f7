#pragma once

#include <memory>

#include "framework/modules/model_registry.h"
#include "models/config/decoder_config.h"
#include "models/config/hf_config.h"

namespace megashard {

/// Adds the families of models/families/, by Hugging Face architecture (LlamaForCausalLM) and by
/// model_type (llama), and "gpt", the network of Megatron's flags; and their Megatron layouts.
void register_models(ModelRegistry& registry);

/// The model that config.json describes, its decoder with the given configuration.
std::shared_ptr<MultiModalModule> make_model(const HfConfig& config, DecoderConfig network);

}  // namespace megashard
