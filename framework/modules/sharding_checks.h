#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"

namespace megashard::detail {

/// Contradictions and keys without effect in an FSDP2 file, as far as they show only with a model
/// and its ranks. All throw UsageError, except for warn_of_keys_without_effect.

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// Keys that are known and were changed from their default, but change nothing here.
void warn_of_keys_without_effect(const Fsdp2Config& config, bool on_cpu, const DiagnosticSink& sink);
/// A number of ranks in reshard_after_forward must divide the `shard` ranks of one copy.
void check_reshard(const Fsdp2Config& config, int shard);
/// What wrapped modules return must be of the dtype in which the modules behind them compute.
void check_output_dtype(const torch::nn::Module& model, const std::vector<NamedModule>& wrapped,
                        const MixedPrecisionPolicy& policy);
/// Parameters that nothing reduces must not be trained on several ranks.
void check_ignored_parameters(const NamedParameters& ignored, const Fsdp2Config& config, int ranks,
                              const DiagnosticSink& sink);

}  // namespace megashard::detail
