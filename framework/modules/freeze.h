#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Turns requires_grad off for parameters whose fully qualified name begins with one of the prefixes (ROLL's
/// freeze_module_prefix) and returns the number of elements that it froze. Call it before fully_shard. Throws
/// UsageError for a prefix without matches, and if nothing is left to train.
int64_t freeze_parameters(torch::nn::Module& model, const std::vector<std::string>& prefixes);

/// As freeze_parameters, for modules whose paths match the patterns of MindSpeed's native route ("model.layers.{0-3}";
/// module_patterns.h), or FSDP2Mixin::other_paths.
int64_t freeze_modules(torch::nn::Module& model, std::vector<std::string> patterns);

}  // namespace megashard
