#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"

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

}  // namespace megashard
