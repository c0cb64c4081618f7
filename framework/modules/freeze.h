#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Turns requires_grad off for the parameters whose fully qualified names begin with one of the
/// prefixes (freeze_module_prefix of ROLL), and returns how many elements these have. Before
/// fully_shard. Throws UsageError for a prefix that no name has, and when nothing is left to train.
int64_t freeze_parameters(torch::nn::Module& model, const std::vector<std::string>& prefixes);

/// The same for the parameters of the modules whose paths match one of the patterns, which are those
/// of MindSpeed's native route ("model.layers.{0-3}"; module_patterns.h).
int64_t freeze_modules(torch::nn::Module& model, const std::vector<std::string>& patterns);

}  // namespace megashard
