#pragma once

#include <string>

#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Writes the adapters of add_lora to a directory that PEFT's PeftModel.from_pretrained loads onto --hf-model:
/// adapter_config.json and adapter_model.safetensors. Collective over `group`.
void save_adapters(MegatronModule& model, const Arguments& arguments, const std::string& folder,
                   const ProcessGroupPtr& group);

}  // namespace megashard
