#pragma once

#include <string>

#include "framework/modules/model_registry.h"

namespace megashard {

/// Loads the library of --model-plugin (framework/modules/model_registry.h), which adds its models to the registry and
/// stays loaded. Throws UsageError if the file cannot be loaded, is not a plugin, was built against another megashard
/// or LibTorch, or if its registration throws.
void load_model_plugin(const std::string& path, ModelRegistry& registry);

}  // namespace megashard
