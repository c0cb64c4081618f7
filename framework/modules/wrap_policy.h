#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"
#include "parallel/fsdp/unit_plan.h"

namespace megashard {

/// The modules whose class_name() is one of `classes`, in the order of the model. A class of another family
/// ("Qwen2Attention") selects its counterpart in the model ("Qwen3Attention"); this is reported to `sink`, and so is a
/// class without counterpart if other classes match. `key` is used in messages. Throws UsageError with the nearest name
/// for a misspelt class, or if none matches.
std::vector<NamedModule> select_classes(const torch::nn::Module& model, const std::vector<std::string>& classes,
                                        const std::string& key, const DiagnosticSink& sink);

/// The modules of experts that `classes` names (moe_experts), in the order of the model: a class of all experts of a
/// block ("Qwen3MoeExperts"), or of one expert, as transformers had before version 5 ("Qwen3MoeMLP"), for which the
/// module of all is taken. Reported to `sink`.
std::vector<NamedModule> experts_of_policy(const torch::nn::Module& model, std::vector<std::string> classes,
                                           const DiagnosticSink& sink);

/// True if the last part of the path is the name of the output projection.
bool is_output_projection(const std::string& path);

/// Modules that are separate groups under ROLL's rules: those of `layers` that contain no other of them, untied
/// embeddings, and on request the output projection. Reported to `sink`.
std::vector<NamedModule> modules_of_policy(const torch::nn::Module& model, const WrapPolicy& policy,
                                           const std::vector<NamedModule>& layers, const DiagnosticSink& sink);

/// Reads the file of --fsdp2-plan: `units`, a list of module paths or lists of paths, num_to_forward_prefetch and
/// num_to_backward_prefetch. Throws UsageError with file, line, key and value.
UnitPlan load_unit_plan(const std::string& path);
UnitPlan parse_unit_plan(const std::string& text, const std::string& source);

/// Formats a plan for load_unit_plan.
std::string unit_plan_text(const UnitPlan& plan);

/// Takes out modules with one end of a weight whose other end is in a module outside them: a head, the embeddings that
/// it is tied to, a decoder around these. All stay in the unit around both ends. Reported to `sink` for `key`.
void leave_out_tied(std::vector<NamedModule>& modules, const std::string& key, const DiagnosticSink& sink);

}  // namespace megashard
