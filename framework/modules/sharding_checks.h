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

/// Contradictions and keys without effect in an FSDP2 file, as far as they show only with a model
/// and its ranks. All throw UsageError, but those that warn.

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// A module that `key` names, which must run hooks.
HookedModule& hooked_module(const NamedModule& named, const std::string& key);
/// Keys that are known and were changed from their default, but change nothing here.
void warn_of_keys_without_effect(const Fsdp2Config& config, bool on_cpu, const DiagnosticSink& sink);
/// A number of ranks in reshard_after_forward must divide the `shard` ranks of one copy.
void check_reshard(const Fsdp2Config& config, int shard);
/// What `wrapped` modules, which have the file's policy, return must be of the dtype in which the modules behind them
/// compute. Of a model under fully_shard.
void check_output_dtype(const torch::nn::Module& model, const std::vector<NamedModule>& wrapped,
                        const MixedPrecisionPolicy& policy);
/// On CPUs a batch norm takes weights and running statistics of one dtype only. Of a model under fully_shard.
void check_batch_norms(const torch::nn::Module& model, const MixedPrecisionPolicy& policy);
/// Parameters that are neither ignored nor in a unit.
void warn_of_whole_parameters(const torch::nn::Module& model, const std::vector<at::Tensor>& ignored,
                              const DiagnosticSink& sink);
/// Parameters that nothing reduces must not be trained on several ranks.
void check_ignored_parameters(const NamedParameters& ignored, const Fsdp2Config& config, int ranks,
                              const DiagnosticSink& sink);

}  // namespace megashard::detail
