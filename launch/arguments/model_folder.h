#pragma once

#include <string>

#include "framework/process_group/launcher_variables.h"

namespace megashard {

/// Throws UsageError unless `folder`, the value of `flag`, is a folder. For a name of the Hugging Face hub the message
/// tells how to download it, or its folder in the hub's cache ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub;
/// variables from `get`).
void require_model_folder(const std::string& flag, const std::string& folder, const GetVariable& get = own_variable);

/// The model of a pipeline of diffusers (FOLDER/transformer, beside model_index.json), or the folder itself if it is
/// none. Throws for a pipeline of two models.
std::string model_of_pipeline(const std::string& flag, const std::string& folder);

}  // namespace megashard
