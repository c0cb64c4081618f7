#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "parallel/fsdp/unit_plan.h"

namespace megashard::detail {

// Keys of the FSDP2 file, and flags, that change a sharded model.

/// reduce_scatter_max_input_buffers, and unless it is on CPUs communication_memory.
void set_communication(torch::nn::Module& model, const Fsdp2Config& config, bool on_cpu);

/// fp8_all_gather of the parameters of these modules, or if there are none of all but embeddings and output layers,
/// that are sharded and have two dimensions at least. `sink` is told how many.
void gather_in_fp8(torch::nn::Module& model, const Fsdp2Config& config, const std::vector<NamedModule>& modules,
                   const DiagnosticSink& sink);

/// apply_unit_plan of the file of --fsdp2-plan. Throws UsageError for one that does not fit the model.
void regroup(torch::nn::Module& model, const UnitPlan& plan);

}  // namespace megashard::detail
