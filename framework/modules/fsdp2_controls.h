#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "parallel/fsdp/unit_plan.h"

namespace megashard::detail {

// Settings of a sharded model from the FSDP2 file and flags.

/// Applies reduce_scatter_max_input_buffers, separate_reduce_scatter_group and, except on CPUs, communication_memory.
void set_communication(torch::nn::Module& model, const Fsdp2Config& config, bool on_cpu);

/// Enables fp8_all_gather for sharded parameters with at least two dimensions: of `modules`, or if empty of all except
/// embeddings and output layers. Reports their number to `sink`.
void gather_in_fp8(torch::nn::Module& model, const Fsdp2Config& config, const std::vector<NamedModule>& modules,
                   const DiagnosticSink& sink);

/// Applies the plan of --fsdp2-plan (apply_unit_plan). Throws UsageError if it does not fit the model.
void regroup(torch::nn::Module& model, const UnitPlan& plan);

}  // namespace megashard::detail
