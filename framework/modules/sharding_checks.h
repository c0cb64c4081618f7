#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard::detail {

/// Checks of an FSDP2 file that need the model and its ranks: contradictions and keys without effect. All throw
/// UsageError, except the warnings.

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// The module that `key` names; throws unless it runs hooks.
HookedModule& hooked_module(const NamedModule& named, const std::string& key);
/// Warns of known keys with non-default values that have no effect here.
void warn_of_keys_without_effect(const Fsdp2Config& config, bool on_cpu, const DiagnosticSink& sink);
/// Throws unless the number of ranks in reshard_after_forward divides the `shard` group size.
void check_reshard(const Fsdp2Config& config, int shard);
/// Throws unless outputs of `wrapped` modules, which use the file's policy, have the dtype in which later modules
/// compute. Call it after fully_shard.
void check_output_dtype(const torch::nn::Module& model, const std::vector<NamedModule>& wrapped,
                        const MixedPrecisionPolicy& policy);
/// Throws if weights and running statistics of a batch norm have different dtypes, which CPUs do not support. Call it
/// after fully_shard.
void check_batch_norms(const torch::nn::Module& model, const MixedPrecisionPolicy& policy);
/// Warns of parameters that are neither ignored nor in a unit.
void warn_of_whole_parameters(const torch::nn::Module& model, const std::vector<at::Tensor>& ignored,
                              const DiagnosticSink& sink);
/// Throws if parameters whose gradients are not reduced would be trained on several ranks.
void check_ignored_parameters(const NamedParameters& ignored, const Fsdp2Config& config, int ranks,
                              const DiagnosticSink& sink);

}  // namespace megashard::detail
