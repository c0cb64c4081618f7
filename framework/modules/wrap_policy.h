#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"

namespace megashard {

/// The modules whose class_name() is one of `classes`, in the order of the model. A class of another
/// family ("Qwen2Attention") stands for the one that plays its part in the model ("Qwen3Attention"),
/// which `sink` is told, as where nothing does but other classes match. `key` stands in messages.
/// Throws UsageError for a class that is misspelt, or where none matches, with the nearest.
std::vector<NamedModule> select_classes(const torch::nn::Module& model, const std::vector<std::string>& classes,
                                        const std::string& key, const DiagnosticSink& sink);

/// The groups that `classes` of experts make, in the order of the model: each module of a class;
/// for the class that transformers stacks experts in ("PExperts" inside "PSparseMoeBlock"), all
/// experts of a block together. Of experts on several ranks this rank's. `sink` is told.
std::vector<std::vector<torch::nn::Module*>> expert_groups(const torch::nn::Module& model,
                                                           const std::vector<std::string>& classes,
                                                           const DiagnosticSink& sink);

/// Whether a path ends in the name of the projection to the vocabulary.
bool is_output_projection(const std::string& path);

/// What becomes a group of its own under ROLL's rules: of `layers` those that contain no other of
/// them, embeddings that are not tied, and on request the output projection. `sink` is told.
std::vector<NamedModule> modules_of_policy(const torch::nn::Module& model, const WrapPolicy& policy,
                                           const std::vector<NamedModule>& layers, const DiagnosticSink& sink);

}  // namespace megashard
