#pragma once

#include <torch/nn/module.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_config.h"

namespace megashard {

/// A submodule and its path in the model ("model.layers.3"). Owned by the model.
struct NamedModule {
  std::string path;
  torch::nn::Module* module = nullptr;
};

/// Paths that a pattern matched, in its order.
struct PatternMatch {
  std::string pattern;
  std::vector<std::string> paths;
};

struct ModuleSelection {
  std::vector<NamedModule> modules;   ///< of all patterns in order, without duplicates
  std::vector<PatternMatch> matches;  ///< per pattern, for the report
};

/// Matches a path against a pattern of MindSpeed's native route: {*} is a number, {0-3,7} one of these numbers, * any
/// text, ? one character.
bool matches_native_pattern(std::string_view pattern, std::string_view path);

/// Selects modules by native patterns, in the order of the model. A pattern without matches is reported to `sink`, or
/// thrown if strict or if none of them matches, as in MindSpeed-MM.
ModuleSelection select_modules_natively(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                                        const std::string& key, Strictness strictness, const DiagnosticSink& sink);

/// Selects modules by path patterns of the FSDP2 file. A pattern is a dotted path below the model; its words may be {*}
/// (every index) or {0-20,25} (inclusive ranges; sorted, without duplicates): model.layers.{*}.mlp.experts.{*}. A path
/// that does not exist and ends in a capitalised name selects modules of that class (package.module.ClassName). `key`
/// is the file's key, for messages. Throws UsageError for malformed patterns, and if the parent of the first {*} does
/// not exist or is not a list. A path without matches is reported to `sink` with the nearest name, or thrown if strict.
ModuleSelection select_modules(const torch::nn::Module& model, const std::vector<std::string>& patterns,
                               const std::string& key, Strictness strictness, const DiagnosticSink& sink);

/// (path in another layout, path here)
using OtherPaths = std::vector<std::pair<std::string, std::string>>;

/// The pattern that names modules of this model: the given one if its words up to the first braces or wildcard are a
/// path of the model; else with the first of the other paths that it begins with replaced. In a model with a
/// language_model, its parts (visual for model.visual) and what transformers' older classes had beside them
/// (model.layers) are other paths, too.
std::string pattern_here(const torch::nn::Module& model, const OtherPaths& paths, const std::string& pattern);

/// Translates the patterns of the file by pattern_here(). Reported to `sink`.
void translate_patterns(const torch::nn::Module& model, const OtherPaths& paths, Fsdp2Config& config,
                        const DiagnosticSink& sink);

/// Throws UsageErrors with all errors of select_modules for the patterns of all keys.
void check_patterns(const torch::nn::Module& model, const Fsdp2Config& config, Strictness strictness);

/// "model.layers.{*} -> 30 modules (model.layers.0 .. model.layers.29)"
std::string describe_match(const PatternMatch& match);

}  // namespace megashard
