#pragma once

#include <string>

#include "framework/process_group/launcher_variables.h"

namespace megashard {

/// Throws UsageError unless `folder`, the value of `flag`, is a folder. A name of the Hugging Face
/// hub is told how to be downloaded, or where it lies in the hub's cache ($HF_HUB_CACHE,
/// $HF_HOME/hub, ~/.cache/huggingface/hub; the variables by `get`).
void require_model_folder(const std::string& flag, const std::string& folder, const GetVariable& get = own_variable);

}  // namespace megashard
