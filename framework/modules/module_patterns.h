#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "framework/modules/fsdp2_config.h"

namespace megashard {

/// A submodule and its path from the model ("model.layers.3"). The model owns it.
struct NamedModule {
  std::string path;
  torch::nn::Module* module = nullptr;
};

/// What one pattern matched, in its order.
struct PatternMatch {
  std::string pattern;
  std::vector<std::string> paths;
};

struct ModuleSelection {
  std::vector<NamedModule> modules;   ///< of all patterns in order, each module once
  std::vector<PatternMatch> matches;  ///< by pattern, for the report
};

/// Finds the modules that path patterns of the FSDP2 file name. A pattern is a dotted path from the
/// model's children; its words may be {*} (every index) or {0-20,25} (inclusive ranges, sorted,
/// once): model.layers.{*}.mlp.experts.{*}. `key` is the file's key, for messages. Throws
/// UsageError for malformed patterns and where the first {*} is on a path that does not exist or is
/// not a list; a path that matches nothing is told to `sink` with the nearest name, or thrown when
/// strict.
ModuleSelection select_modules(const torch::nn::Module& model,
                               const std::vector<std::string>& patterns, const std::string& key,
                               Strictness strictness, const DiagnosticSink& sink);

/// "model.layers.{*} -> 30 modules (model.layers.0 .. model.layers.29)"
std::string describe_match(const PatternMatch& match);

}  // namespace megashard
